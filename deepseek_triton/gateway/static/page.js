// The chat page. No framework, no build step, nothing fetched from elsewhere. Whatever a model writes
// reaches the page as text, never as markup.

const element = (id) => document.getElementById(id);
const form = element("form");
const input = element("input");
const log = element("log");
const notice = element("notice");
const model = element("model");

let conversation = []; // messages as the API takes them
let running = null; // the AbortController of the answer that streams

function make(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function headers() {
  const key = element("api-key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

function complain(text) {
  notice.textContent = text;
  notice.hidden = !text;
}

async function problem(response) {
  try {
    const body = await response.json();
    return body.error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

async function listModels() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) {
      if (response.status === 401) element("settings").open = true;
      return complain(await problem(response));
    }
    const { data } = await response.json();
    model.replaceChildren(...data.map(({ id }) => new Option(id, id)));
    model.disabled = data.length < 2;
    complain("");
  } catch {
    complain("The server cannot be reached.");
  }
}

// Text with ``` fences as paragraphs and code blocks; an open fence counts up to the end.
function render(target, text) {
  target.replaceChildren(
    ...text.split("```").map((part, index) => {
      if (index % 2 === 0) return document.createTextNode(part);
      const pre = make("pre");
      pre.append(make("code", "", part.replace(/^[^\n]*\n/, "").replace(/\n$/, "")));
      return pre;
    }),
  );
}

function addArticle(role, title) {
  element("hello")?.remove();
  const article = make("article", role);
  article.append(make("h2", "", title));
  log.append(article);
  return article;
}

function addUser(text) {
  addArticle("user", "You").append(make("div", "text", text));
}

// The parts of an answer on the page; `show` may be called as often as text arrives.
function addAnswer(verbatim) {
  const article = addArticle("assistant", "Model");
  const reasoning = make("details", "reasoning");
  reasoning.append(make("summary", "", "Reasoning"), make("div"));
  reasoning.hidden = true;
  const text = make(verbatim ? "pre" : "div", "text waiting");
  const foot = make("div", "foot");
  const figures = make("span", "figures");
  const copy = make("button", "", "Copy");
  copy.type = "button";
  foot.append(figures, copy);
  foot.hidden = true;
  article.append(reasoning, text, foot);
  const answer = { text: "", reasoning: "", drawn: false };
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(answer.text);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  const draw = () => {
    answer.drawn = false;
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    reasoning.hidden = !answer.reasoning;
    reasoning.lastChild.textContent = answer.reasoning;
    if (verbatim) text.textContent = answer.text;
    else render(text, answer.text);
    if (atEnd) log.scrollTop = log.scrollHeight;
  };
  return {
    answer,
    show() {
      if (!answer.drawn) requestAnimationFrame(draw);
      answer.drawn = true;
    },
    end(line) {
      draw();
      text.classList.remove("waiting");
      figures.textContent = line;
      foot.hidden = false;
      log.scrollTop = log.scrollHeight;
    },
  };
}

// Server-sent events of a response, parsed; stops at [DONE].
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: ?/, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function requestFor(text) {
  const body = {
    model: model.value,
    stream: true,
    stream_options: { include_usage: true },
    max_tokens: Number(element("max-tokens").value) || 512,
    temperature: Number(element("temperature").value),
  };
  if (element("mode").value === "complete") return ["v1/completions", { ...body, prompt: text }];
  const system = element("system").value.trim();
  const first = system ? [{ role: "system", content: system }] : [];
  return ["v1/chat/completions", { ...body, messages: [...first, ...conversation] }];
}

function figures(times, tokens, reason) {
  if (!times.length) return reason;
  const seconds = (times.at(-1) - times[0]) / 1000;
  const rate = seconds > 0 && tokens > 1 ? `${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
  return [`${tokens} tokens`, `first after ${times.first} ms`, rate, reason]
    .filter(Boolean)
    .join(" · ");
}

const REASONS = { length: "cut at the limit", stop: "", tool_calls: "asks for a tool" };

async function answerTo(text, verbatim) {
  const [path, body] = requestFor(text);
  const view = addAnswer(verbatim);
  const started = performance.now();
  const times = [];
  let tokens = 0;
  let reason = "";
  running = new AbortController();
  busy(true);
  try {
    const response = await fetch(path, {
      method: "POST",
      headers: headers(),
      body: JSON.stringify(body),
      signal: running.signal,
    });
    if (!response.ok) throw new Error(await problem(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) tokens = event.usage.completion_tokens;
      const choice = event.choices?.[0];
      if (!choice) continue;
      const delta = choice.delta ?? { content: choice.text };
      if (delta.content || delta.reasoning_content) {
        times.push(performance.now());
        times.first ??= Math.round(times[0] - started);
        tokens = Math.max(tokens, times.length);
      }
      view.answer.text += delta.content ?? "";
      view.answer.reasoning += delta.reasoning_content ?? "";
      if (choice.finish_reason) reason = REASONS[choice.finish_reason] ?? choice.finish_reason;
      view.show();
    }
  } catch (error) {
    if (error.name === "AbortError") reason = "stopped";
    else {
      reason = "failed";
      complain(error instanceof TypeError ? "The connection broke." : error.message);
    }
  }
  view.end(figures(times, tokens, reason));
  running = null;
  busy(false);
  return view.answer.text;
}

function busy(is) {
  element("send").hidden = is;
  element("stop").hidden = !is;
  if (is) element("stop").focus();
  else input.focus();
}

async function send() {
  const text = input.value;
  if (running || !text.trim()) return;
  complain("");
  input.value = "";
  grow();
  addUser(text);
  const verbatim = element("mode").value === "complete";
  const epoch = conversation;
  if (!verbatim) epoch.push({ role: "user", content: text });
  const answer = await answerTo(text, verbatim);
  if (!verbatim && answer) epoch.push({ role: "assistant", content: answer });
  else if (!verbatim) epoch.pop(); // a question without an answer is not part of the talk
}

function grow() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
input.addEventListener("input", grow);
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
element("stop").addEventListener("click", () => running?.abort());
element("new-chat").addEventListener("click", () => {
  running?.abort();
  conversation = [];
  log.replaceChildren(make("p", "", "A new conversation."));
  log.firstChild.id = "hello";
  complain("");
  input.focus();
});

const key = element("api-key");
key.value = sessionStorage.getItem("api-key") ?? "";
key.addEventListener("change", () => {
  sessionStorage.setItem("api-key", key.value.trim());
  listModels();
});
listModels();
