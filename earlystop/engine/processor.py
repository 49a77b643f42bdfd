"""What both runners share: admitting a request, one step, failing open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from earlystop.config import Config, load_config
from earlystop.control import layout
from earlystop.control.params import policy_columns
from earlystop.control.state import Controller, Rows, Start
from earlystop.control.tables import Tables
from earlystop.engine import requests
from earlystop.engine.commands import Command
from earlystop.engine.compat import logger
from earlystop.engine.publish import Owner, Reporter
from earlystop.engine.served import examine
from earlystop.engine.tap import TAP
from earlystop.errors import ConfigError
from earlystop.kernels.mask import MASK_RESERVED, write_rows
from earlystop.kernels.stats import alloc_stats, logit_stats, warmup
from earlystop.policy import Policy
from earlystop.profile import Profile
from earlystop.resolve import resolve
from earlystop.resolved import Resolved

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

GRAM_CELLS = (4096, 65536)  # bounds of a slot's novelty table; in between, four cells a token of context


class Processor:
    """Early stopping for one engine: the decision's state, and everything host-side around it.

    Args:
        vllm_config: the engine's configuration.
        runner: "v1" or "v2".
        slots: most requests at a time.
        depth: most logits rows of a request.
        device: where the logits live.
        request_id_of: vLLM's internal request id of a slot, None where it cannot be known.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        *,
        runner: str,
        slots: int,
        depth: int,
        device: torch.device,
        request_id_of: requests.RequestIds | None,
    ) -> None:
        self.config: Config = load_config(vllm_config.additional_config or {})
        self.profiles: dict[str, Profile] = self.config.load_profiles()
        self.served = examine(vllm_config, runner, self.config.engine)
        self.slots = slots
        self.request_id_of = request_id_of
        self.lora_enabled = vllm_config.lora_config is not None
        parallel = vllm_config.parallel_config
        # Hidden states of two ranks may differ in the last bit, and then their verdicts.
        self.has_similarity = parallel.tensor_parallel_size == 1
        self.tables = Tables.build(
            self.served.table, device, costs=self._costs(), reserved=tuple(self.served.reserved.values())
        )
        gram_size = 1 << (4 * self.served.max_model_len - 1).bit_length()
        self.controller = Controller(
            self.tables,
            slots=slots,
            depth=depth,
            hidden=self.served.hidden_size if self.has_similarity else 0,
            dtype=vllm_config.model_config.dtype,
            gram_size=min(max(gram_size, GRAM_CELLS[0]), GRAM_CELLS[1]),
            centre=self._centre(),
        )
        self.active = np.zeros(slots, bool)
        self.grammar = np.zeros(slots, bool)
        self.edited = np.zeros(slots, bool)  # bias, penalties, bans: `apply` sees other logits than the model made
        self.said_untapped = False
        self.epochs = np.zeros(slots, np.int64)
        self.by_stream: dict[str, set[int]] = {}
        self.stream_of: list[str] = [""] * slots
        self.faults = 0
        self.broken = False
        publishes = self._publishes(vllm_config)
        self.reporter = Reporter(
            self.config.bus, slots=slots, depth=depth, device=device, dp_rank=parallel.data_parallel_rank
        )
        if not publishes:
            self.reporter.mute()
        TAP.install(self.tables.ending, self.served.vocab_size, slots * depth)
        self._after_mask = alloc_stats(slots * depth, device)
        self._verdicts = torch.empty(slots * depth, dtype=torch.int32, device=device)
        self._warm_up(vllm_config.model_config.dtype, torch.int64 if runner == "v2" else torch.int32)
        logger.info("earlystop on %s, %s", runner, self.config.describe())

    def _warm_up(self, dtype: torch.dtype, pos: torch.dtype) -> None:
        """Compiles everything that a step runs, so that the first opted-in request does not wait for it."""
        device, vocab, ending = self.controller.device, self.served.vocab_size, self.tables.ending
        for kind in {dtype, torch.float32}:  # float32: the processed logits, where the tap saw nothing
            warmup(device, kind, vocab, ending.shape[1])
        self.controller.warm_up(pos)
        row = torch.zeros(1, vocab, dtype=torch.float32, device=device)
        for token, bits in ((-1, MASK_RESERVED), (0, 0)):
            force = torch.full((1,), token, dtype=torch.int32, device=device)
            flags = torch.full((1,), bits, dtype=torch.int32, device=device)
            write_rows(row, force, flags, ending, self.tables.reserved, torch.zeros_like(flags))

    def _publishes(self, vllm_config: VllmConfig) -> bool:
        """Only one rank tells the outside; all ranks decide."""
        if vllm_config.parallel_config.world_size == 1:
            return True
        from vllm.distributed import get_tensor_model_parallel_rank

        return bool(get_tensor_model_parallel_rank() == 0)

    def _costs(self) -> np.ndarray[Any, Any] | None:
        for profile in self.profiles.values():
            if profile.costs:
                costs = np.ones(self.served.vocab_size, np.float32)
                costs[: len(profile.costs)] = profile.costs[: self.served.vocab_size]
                return costs
        return None

    def _centre(self) -> torch.Tensor | None:
        for profile in self.profiles.values():
            if profile.similarity_centre and len(profile.similarity_centre) == self.served.hidden_size:
                return torch.tensor(profile.similarity_centre, dtype=torch.float32)
        return None

    # --- admission --------------------------------------------------------------------------------

    def admit(self, slot: int, params: SamplingParams, prompt_len: int) -> bool:
        """A request takes `slot`, new or back from a preemption; returns whether it is opted in.

        Everything that the slot held is overwritten: slots are recycled, and nobody says when.
        """
        self._forget(slot)
        if self.broken:
            return False
        try:
            policy = Policy.from_extra_args(params.extra_args or {})
            command = Command.read(policy)
            if command is not None:
                self.command(command)
                return self._idle(slot)
            resolved = self._resolve(policy, params)
            if resolved is None:
                return self._idle(slot)
            opted_in = self._start(slot, params, resolved, prompt_len)
            asked = policy.policy if policy is not None else None
            if resolved.policy == "observe" and asked not in (None, "observe"):
                self.reporter.error("admission", ConfigError("; ".join(resolved.warnings)), slot)
            return opted_in
        except Exception as error:  # a fault of ours never costs a request
            self.fault("admission", error, slot)
            return self._idle(slot)

    def _resolve(self, policy: Policy | None, params: SamplingParams) -> Resolved | None:
        # V2 does not say which adapter a request runs with; a profile of the bare model may not speak for it.
        lora = "possibly one" if self.lora_enabled else None
        identity = self.served.identity_of(params, lora)
        return resolve(policy, self.config, self.profiles, identity, profiles_unverifiable=True)

    def _forget(self, slot: int) -> None:
        stream = self.stream_of[slot]
        if stream:
            members = self.by_stream.get(stream, set())
            members.discard(slot)
            if not members:
                self.by_stream.pop(stream, None)
            self.stream_of[slot] = ""

    def release(self, slot: int) -> None:
        """The request in `slot` has ended, where the runner says so."""
        self._forget(slot)
        self.active[slot] = self.grammar[slot] = self.edited[slot] = False

    def _idle(self, slot: int) -> bool:
        if self.active[slot]:
            self.controller.stage(
                slot, np.zeros(layout.PHASE, np.int32), np.zeros(layout.BUDGET, np.float64)
            )  # MODE 0: nobody's
        self.active[slot] = self.grammar[slot] = self.edited[slot] = False
        return False

    def _start(self, slot: int, params: SamplingParams, resolved: Resolved, prompt_len: int) -> bool:
        request_id = self.request_id_of(slot) if self.request_id_of is not None else None
        stream = resolved.id or request_id or f"slot-{slot}-{self.epochs[slot]}"
        self.epochs[slot] += 1
        self.active[slot] = True
        self.grammar[slot] = params.structured_outputs is not None
        self.edited[slot] = self.grammar[slot] or edits_logits(params)
        self.stream_of[slot] = stream
        self.by_stream.setdefault(stream, set()).add(slot)
        listed = set(params.stop_token_ids or ())
        limit = self.served.max_model_len - prompt_len
        if params.max_tokens is not None:
            limit = min(limit, params.max_tokens)
        ints, floats = policy_columns(
            resolved,
            thinks=self.served.table.thinks,
            limit=limit,
            min_end=params.min_tokens,
            grammar=bool(self.grammar[slot]),
            similarity=self.has_similarity,
            stop_ids={reason.code: token for reason, token in self.served.reserved.items() if token in listed},
            default_stop=self._stop_token(params),
            prompt_len=prompt_len,
            epoch=int(self.epochs[slot]),
        )
        self.controller.stage(slot, ints, floats)
        warnings = (*resolved.warnings, *self._cannot(resolved, params))
        owner = Owner.of(stream, request_id, resolved, warnings, limit=limit)
        self.reporter.own(slot, int(self.epochs[slot]), owner)
        TAP.want()
        return True

    def _stop_token(self, params: SamplingParams) -> int:
        """The token whose sampling ends the request: EOS, or under ignore_eos one of its stop_token_ids."""
        if params.ignore_eos:
            return int(params.stop_token_ids[0]) if params.stop_token_ids else -1
        if params.eos_token_id is not None:
            return int(params.eos_token_id)
        return self.served.table.eos[0] if self.served.table.eos else -1

    def _cannot(self, resolved: Resolved, params: SamplingParams) -> list[str]:
        """What this policy asks for and this model cannot do."""
        said = []
        if resolved.finish == "close_thinking" and not self.served.table.thinks:
            said.append("finish=close_thinking, but the tokenizer has no thinking tags: nothing will be ended")
        if resolved.budget_scope == "thinking" and not self.served.table.thinks:
            said.append("budget_scope=thinking, but the tokenizer has no thinking tags: the budget will not bind")
        if self._stop_token(params) < 0:
            said.append("no token ends this request: only the thinking can be closed")
        return said

    # --- control ----------------------------------------------------------------------------------

    def command(self, command: Command) -> list[int]:
        """An outside wish, for every running child of a stream; returns the slots it reached."""
        slots = sorted(self.by_stream.get(command.stream, ()))
        if slots:
            code = command.reason.code if command.reason is not None else 0
            self.controller.command(slots, stop=code, extra=command.extra)
        return slots

    # --- the step ---------------------------------------------------------------------------------

    def flush(self, start: Start | None) -> None:
        """Brings staged admissions to the device."""
        self.controller.flush(start)

    def step(self, logits: torch.Tensor, rows: Rows, batch: np.ndarray[Any, Any], *, first_row: int = 0) -> None:
        """One call of vLLM's `apply` with opted-in rows in it; changes `logits` in place.

        `batch` are the slots in it, on the host: what is known of them there saves launches. `first_row` is where the
        rows begin in the forward that made them, when they are one chunk of it.
        """
        try:
            any_grammar, any_edited = bool(self.grammar[batch].any()), bool(self.edited[batch].any())
            self._step(logits, rows, first_row, any_grammar, any_edited)
        except Exception as error:  # no row can be named: early stopping ends for all, the requests go on
            self.fault("step", error, None)

    def _step(self, logits: torch.Tensor, rows: Rows, first_row: int, any_grammar: bool, any_edited: bool) -> None:
        ending = self.tables.ending
        tapped = TAP.take(rows.slot.shape[0], first_row)
        values = argmax = hidden = None
        if tapped is not None:
            values, argmax = tapped.values, tapped.argmax
            hidden = tapped.hidden if self.has_similarity else None
        elif not any_edited:  # batch-sharded sampling: these rows are raw logits all the same
            values, argmax, _ = logit_stats(logits, ending)
        if tapped is None and not self.said_untapped:
            self.said_untapped = True
            logger.warning("vLLM's logits layer did not show these rows: no unit similarity for them")
        masked = logit_stats(logits, ending, self._after_mask).values if any_grammar else None
        verdict = self.controller.step(rows, values, argmax, masked=masked, hidden=hidden)
        write_rows(
            logits, verdict.force, verdict.flags, ending, self.tables.reserved, verdict.grammar,
            scratch=self._verdicts,
        )  # fmt: skip
        self.reporter.push(verdict.report, verdict.trace)

    def fault(self, stage: str, error: Exception, slot: int | None) -> None:
        """Fails open: counts, logs once, tells the bus, and disables the slot, or all of early stopping."""
        self.faults += 1
        if self.faults == 1:
            logger.exception("earlystop failed in %s and lets the requests run on without it", stage, exc_info=error)
        self.reporter.error(stage, error, slot)
        if slot is None:
            self.broken = True
            self.active[:] = False


def edits_logits(params: SamplingParams) -> bool:
    """Whether vLLM changes this request's logits before it calls us."""
    return bool(
        params.logit_bias
        or params.bad_words
        or params.allowed_token_ids
        or params.min_tokens
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
    )
