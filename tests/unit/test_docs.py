"""What the documentation says by rote is what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deepseek_triton.config import settings_markdown
from deepseek_triton.metrics import METRICS
from deepseek_triton.wire import ENSEMBLE, MODELS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_serving_lists_every_setting_and_metric() -> None:
    text = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    assert settings_markdown() in text
    for metric in METRICS:
        assert f"`{metric.full_name}`" in text


def test_compatibility_lists_every_tensor_of_the_ensemble() -> None:
    text = (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
    wire = MODELS[ENSEMBLE]
    for tensor in (*wire.inputs, *wire.outputs):
        assert f"`{tensor.name}`" in text, tensor.name


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing
