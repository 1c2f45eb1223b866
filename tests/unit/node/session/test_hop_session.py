"""What a hop checks of a frame beyond the session's rules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.session.hop_session import HopKnowledge, check_sweep
from node.session.sweep_run import HopRole
from swarm.base.declared import Form
from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.protocol.messages import Codec, Sampling, Sweep, SweepFrame
from swarm.protocol.pick_rules import PickRules
from swarm.protocol.wire import decode_frame, encode_frame

RULES = PickRules(logit_bias=((3, 1.0),), end_tokens=(9,))


def test_a_hop_holds_a_sampling_to_its_declaration_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder did; what is left is that it names tokens of this model."""
    first, sampling = TreeNodeId(0), Sampling(temperature=1.0, rules=RULES)
    data = encode_frame(SweepFrame(Sweep(1, 0, first, (5,), (None,), first, sampling=sampling)))
    held, read = list[type](), Form.read

    def counted(form: Form[Any], raw: Any, given: dict[str, Any]) -> Any:  # noqa: ANN401
        held.append(form.kind)
        return read(form, raw, given)

    monkeypatch.setattr(Form, "read", counted)
    frame, role = decode_frame(data), HopRole(Span(0, 1), Codec.FP32, 9, None)
    assert isinstance(frame, SweepFrame)
    check_sweep(frame, cast("Any", SimpleNamespace(vocab_size=10)), role, HopKnowledge())
    assert (held.count(Sampling), held.count(PickRules)) == (1, 1)
    with pytest.raises(RemoteProtocolError, match="end_tokens must name token ids below 9"):
        check_sweep(frame, cast("Any", SimpleNamespace(vocab_size=9)), role, HopKnowledge())
