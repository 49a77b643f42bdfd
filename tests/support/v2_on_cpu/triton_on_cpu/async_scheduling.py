"""Keeps asynchronous scheduling, the default on GPUs, switched on where the CPU platform switches it off."""

import os


def keep_on() -> None:
    """With FORCE_ASYNC_SCHEDULING=1: undoes the CPU platform's decision, on both runners."""
    if os.environ.get("FORCE_ASYNC_SCHEDULING") != "1":
        return
    from vllm.platforms.cpu import CpuPlatform

    if getattr(CpuPlatform, "_async_scheduling_kept_on", False):
        return
    CpuPlatform._async_scheduling_kept_on = True
    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, vllm_config):  # type: ignore[no-untyped-def]
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
