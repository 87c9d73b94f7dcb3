"""Every launch follows its tensors: their device is current while it runs, and it goes into torch's stream.

Without a second GPU a wrong one shows in no number, so the sources are read; `make gpu-check` tries a side stream.
"""

import re

from tests.ops.emulator import CSRC

DEVICE_OF_TORCH = "const torch::stable::accelerator::DeviceGuard guard"


def bodies(text: str) -> dict[str, str]:
    """Functions defined at the margin of a file: name -> parameters and body."""
    found = re.finditer(r"^(?!\s|template|namespace)[^\n;={]*?\b(\w+)(\([^{;]*\{\n.*?^\})", text, re.M | re.S)
    return {match[1]: match[2] for match in found}


def test_every_function_that_is_given_a_device_makes_it_the_current_one() -> None:
    told = {
        name: body
        for path in sorted((CSRC / "cuda").glob("*.cu"))
        for name, body in bodies(path.read_text()).items()
        if re.search(r"\bint device\b", body.partition("{")[0])
    }
    assert {"forward", "backward", "matmul_forward", "matmul_backward", "newton_schulz"} < set(told)
    assert [name for name, body in told.items() if "OnDevice" not in body and "launch" in body] == []


def test_every_launch_is_given_the_stream_that_its_function_was_given() -> None:
    launches = [
        (name, call[1].split(","))
        for path in sorted((CSRC / "cuda").glob("*.cu"))
        for name, body in bodies(path.read_text()).items()
        for call in re.finditer(r"\blaunch\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)", body)
    ]
    assert len(launches) >= 10
    assert [name for name, arguments in launches if "stream" not in map(str.strip, arguments)] == []


def test_torch_s_device_and_stream_are_those_of_the_tensors() -> None:
    pairs, inverses = ((CSRC / name).read_text() for name in ("pairwise_kernel_ops.cpp", "inverse_ops.cpp"))
    (on_cuda,) = re.findall(r"^struct OnCuda \{\n(.*?)^\};", pairs, re.M | re.S)
    assert "device(q.get_device_index()), guard(device), stream(current_stream(device))" in on_cuda
    entries = {name: body for name, body in bodies(inverses).items() if name.endswith("_cuda")}
    assert set(entries) == {"newton_schulz_inverse_cuda", "spd_inverse_cuda"}
    for body in entries.values():
        assert "W_any.get_device_index()" in body
        assert f"{DEVICE_OF_TORCH}(device)" in body
        assert "current_stream(device)" in body
