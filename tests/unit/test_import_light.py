import subprocess
import sys

import pytest

import earlystop

PURE = [
    "attach", "config", "cost", "errors", "identity", "policy", "profile", "reserved", "resolve", "resolved", "signals",
]  # fmt: skip


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_earlystop_pulls_in_nothing_heavy():
    """`import earlystop` loads neither torch, triton, vllm nor numpy."""
    heavy = run("import sys, earlystop; print({'torch', 'triton', 'vllm', 'numpy'} & set(sys.modules))")
    assert heavy.strip() == "set()"


def test_the_pure_layer_stays_pure():
    """Not even all pure modules together load torch, triton or vllm."""
    imports = "; ".join(f"import earlystop.{name}" for name in PURE)
    assert run(f"import sys; {imports}; print({{'torch', 'triton', 'vllm'}} & set(sys.modules))").strip() == "set()"


def test_all_is_sorted_and_every_name_is_listed():
    """The public surface is the design's, and dir() shows it."""
    assert earlystop.__all__ == sorted(earlystop.__all__)
    assert set(earlystop.__all__) == {
        "Policy", "Profile", "Signal", "StopReason", "attach", "attach_each", "summarize", "watch",
    }  # fmt: skip
    assert set(earlystop.__all__) <= set(dir(earlystop))


@pytest.mark.parametrize("first", ["from earlystop.attach import attach_each", "import earlystop.attach", "pass"])
def test_a_module_never_hides_the_function_of_its_name(first):
    """`earlystop.attach` is the function, whichever way its module was imported first."""
    assert run(f"{first}\nimport earlystop\nprint(callable(earlystop.attach))").strip() == "True"


def test_an_unknown_name_is_an_attribute_error():
    """A typo is told, not swallowed by the lazy loader."""
    with pytest.raises(AttributeError, match="atach"):
        _ = earlystop.atach
