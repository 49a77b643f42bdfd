"""The model's tables on the device: the compiled tokenizer, the closing sequence, costs, ending tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from earlystop.control import layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from earlystop.units import TokenTable


@dataclass(frozen=True)
class Tables:
    """Device tensors that never change while the engine lives.

    flags [V] int32, symbol_offsets [V + 1] int32, symbols int32, costs float32 [V] or [1], sequence int32
    (opening tag, closing tag, closing sequence), ending int32 [2, M] padded with -1 (row 0 the first token of
    the closing tag, row 1 the EOS ids), reserved int32 [N] stop ids that opted-in rows must not sample.
    """

    token_table: TokenTable
    flags: torch.Tensor
    symbol_offsets: torch.Tensor
    symbols: torch.Tensor
    costs: torch.Tensor
    sequence: torch.Tensor
    ending: torch.Tensor
    reserved: torch.Tensor
    has_costs: bool

    @classmethod
    def build(
        cls,
        table: TokenTable,
        device: torch.device,
        *,
        costs: np.ndarray[tuple[int], np.dtype[np.float32]] | None = None,
        reserved: Sequence[int] = (),
    ) -> Tables:
        """Uploads a compiled tokenizer; `costs` [V] are cost units per token, None counts tokens."""

        def ints(values: object) -> torch.Tensor:
            return torch.as_tensor(np.asarray(values, np.int32), device=device)

        width = max(1, len(table.eos))
        ending = np.full((2, width), -1, np.int32)
        if table.closing:
            ending[0, 0] = table.closing[0]
        ending[1, : len(table.eos)] = table.eos
        return cls(
            token_table=table,
            flags=ints(table.flags),
            symbol_offsets=ints(table.symbol_offsets),
            symbols=ints(table.symbols),
            costs=torch.as_tensor(np.zeros(1, np.float32) if costs is None else costs, device=device),
            sequence=ints((*table.opening, *table.closing, *table.sequence) or (0,)),
            ending=ints(ending),
            reserved=ints(list(reserved)),
            has_costs=costs is not None,
        )

    def header(self, gram_size: int, depth: int) -> list[int]:
        """The H_* columns of `layout.py`."""
        header = [0] * layout.N_HEADER
        header[layout.H_OPEN_LEN] = len(self.token_table.opening)
        header[layout.H_SHUT_LEN] = len(self.token_table.closing)
        header[layout.H_CLOSE_LEN] = len(self.token_table.sequence)
        header[layout.H_TAG_AT] = self.token_table.tag_at
        header[layout.H_VOCAB] = self.flags.shape[0]
        header[layout.H_COSTS] = int(self.has_costs)
        header[layout.H_GRAM_SIZE] = gram_size
        header[layout.H_DEPTH] = depth
        return header
