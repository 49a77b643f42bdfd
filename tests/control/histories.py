"""Random histories from a seed, recorded step by step, for comparing backends."""

from __future__ import annotations

import random

import numpy as np

from earlystop.control.state import Controller

from .harness import NEWLINE, WAIT, Request, Sim, toy_table

STATE = ("ints", "floats", "grams", "drafts", "stored", "pending", "pending_argmax", "pending_plan")


def play_history(
    seed: int, kind: type[Controller], *, steps: int = 40, costs: bool | None = None
) -> list[dict[str, np.ndarray]]:
    """State and verdict after each step: drafts, chunks, preemption, aborts, commands, recycled slots."""
    from .test_histories import guesses, random_request

    chance = random.Random(seed)  # noqa: S311  (a script, no secret)
    table = toy_table(
        pieces=chance.random() < 0.3,
        transition=(NEWLINE, WAIT, 12)[: chance.randint(0, 3)],
        thinks=chance.random() < 0.8,
    )
    prices = np.random.default_rng(seed).random(104).astype(np.float32) if chance.random() < 0.3 else None
    sim = Sim(table, slots=3, depth=chance.choice([1, 3]), seed=seed, kind=kind, costs=prices, gram_size=256)
    waiting: list[Request] = []
    out = []
    for _ in range(steps):
        if sim.free and chance.random() < 0.5:
            new = [waiting.pop()] if waiting and chance.random() < 0.5 else []
            new = new or [random_request(chance, signals=True, grace=True, hides=True)]
            sim.add(*new)
        if sim.running and chance.random() < 0.07:
            request = chance.choice(sim.running)
            sim.preempt(request)
            waiting.append(request)
        if sim.running and chance.random() < 0.05:
            slots = [request.slot for request in sim.running if request.policy is not None]
            if slots:
                sim.controller.command(slots, stop=chance.choice([0, 8]), extra=chance.choice([0.0, 2.5]))
        if not sim.running:
            continue
        k, luck, chunk = chance.randint(0, 3), chance.choice([0.5, 1.0]), chance.randint(1, 9)
        sim.step(lambda r, k=k, luck=luck: guesses(r, sim, k, luck), lambda _, chunk=chunk: chunk)
        assert sim.verdict is not None
        n = len(sim.last_rows)
        step = {name: tensor.numpy().copy() for name, tensor in sim.verdict._asdict().items() if name != "trace"}
        committed = sim.controller.committed[:n].numpy()
        step["trace"] = np.concatenate([sim.verdict.trace[r, : committed[r]].numpy() for r in range(n)])
        step |= {name: getattr(sim.controller, name).numpy().copy() for name in STATE}
        out.append(step)
    return out
