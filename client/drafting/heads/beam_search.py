"""The prefixes that beams of a recurrent head share. Tensors in, tensors out; knows no tree.

Source: ReDrafter (arXiv 2403.09919), section 3.2 and appendix A.1: prefixes are found by comparing all beams at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

EMPTY = -1
"""Fills up a beam that was dropped before the last level."""


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Different prefixes of some beams, shorter ones first; the empty one is left out.

    Attributes:
        tokens: [prefixes], the last token of each.
        parents: [prefixes], the prefix without that token; `EMPTY` where that is the empty one.
        beams: [prefixes], the first beam that begins with it.
        levels: [prefixes], the level at which it ends.
        place: [beams, levels], the prefix that ends there; `EMPTY` behind a beam's end.
        paths: [beams, levels], the beams themselves.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    beams: torch.Tensor
    levels: torch.Tensor
    place: torch.Tensor
    paths: torch.Tensor

    def find(self, paths: torch.Tensor) -> torch.Tensor:
        """The prefixes [n] that equal these paths [n, level]; some beam must begin with each."""
        level = paths.shape[1]
        beam = (self.paths[None, :, :level] == paths[:, None]).all(dim=2).to(torch.int8).argmax(dim=1)
        return self.place[beam, level - 1]


def shared_prefixes(beams: torch.Tensor) -> Prefixes:
    """Every prefix of `beams` [beams, levels] once; `EMPTY` fills a beam up behind its end."""
    count, levels = beams.shape
    same = (beams[:, None, :] == beams[None, :, :]).cumprod(dim=2)  # [i, j, l]: i and j agree up to level l
    first = same.argmax(dim=1)  # the first beam with that prefix
    is_own = (first == torch.arange(count, device=beams.device)[:, None]) & (beams != EMPTY)
    level, beam = is_own.T.nonzero(as_tuple=True)  # by level, so that parents come before their children
    place = torch.full((count, levels), EMPTY, device=beams.device)
    place[beam, level] = torch.arange(len(beam), device=beams.device)
    place = place.gather(0, first).where(beams != EMPTY, EMPTY)
    parents = place[beam, level - 1].where(level > 0, EMPTY)
    return Prefixes(beams[beam, level], parents, beam, level, place, beams)
