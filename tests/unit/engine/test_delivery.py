from deepseek_triton.engine.delivery import Delivery
from deepseek_triton.request import FinishReason, RequestKey, TokenOutput


def output(key, index, finish_reason=None):
    return TokenOutput(RequestKey(key), index, (1,), (), 0.0, 1, index + 1, finish_reason)


def test_outputs_are_handed_over_in_order():
    taken = []
    deliver = Delivery(abort=lambda key: None)
    deliver([(taken.append, output("a", 0)), (taken.append, output("b", 0))])
    deliver([(taken.append, output("a", 1))])
    assert [(o.request_key, o.index) for o in taken] == [("a", 0), ("b", 0), ("a", 1)]


def test_a_receiver_that_raises_is_aborted_once_and_gets_only_its_last_output():
    aborted, taken, other = [], [], []

    def broken(received):
        taken.append(received.index)
        raise OSError("connection lost")

    deliver = Delivery(abort=aborted.append)
    deliver([(broken, output("a", 0)), (other.append, output("b", 0))])
    deliver([(broken, output("a", 1)), (other.append, output("b", 1))])
    deliver([(broken, output("a", 2, FinishReason.CANCELLED))])
    assert aborted == ["a"]
    assert taken == [0, 2]
    assert len(other) == 2


def test_a_last_output_that_is_not_taken_aborts_nothing():
    aborted = []

    def broken(received):
        raise OSError("connection lost")

    Delivery(abort=aborted.append)([(broken, output("a", 0, FinishReason.STOP))])
    assert aborted == []
