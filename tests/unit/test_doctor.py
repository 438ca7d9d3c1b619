"""What the doctor says of the Python that runs it."""

import sys
import sysconfig

import pytest

from rlbench.workbench.doctor import check_python


@pytest.mark.parametrize(
    "arguments, prefix, is_slow",
    [
        ("'--enable-shared' '--prefix=/opt/python'", "/opt/python", True),
        ("'--enable-optimizations'", "/opt/python", False),
        ("'--enable-shared'", "/usr", False),
        (None, "/opt/python", False),
    ],
)
def test_a_python_compiled_without_optimizations_is_told(monkeypatch, arguments, prefix, is_slow):
    "The check passes all the same; what a system brings was optimized without a word of it among its arguments."
    monkeypatch.setattr(sysconfig, "get_config_var", {"CONFIG_ARGS": arguments}.get)
    monkeypatch.setattr(sys, "base_prefix", prefix)
    check = check_python()
    assert check.ok and ("--enable-optimizations" in check.found) == is_slow
