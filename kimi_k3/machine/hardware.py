"""What machine this is: processor, memory, and how much of it the GPU may use."""

import os
import platform
import subprocess
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """A computer as K3 sees it. Sizes are bytes, ``wired_limit_mb`` is MiB.

    ``gpu_memory`` is what the system lets a Metal GPU use; None without such a GPU.
    ``wired_limit_mb`` is the setting behind it; 0 is the system's default, None means
    that the system has no such setting.
    """

    system: str
    system_version: str
    processor: str
    device: str
    gpu: bool
    memory: int
    gpu_memory: int | None = None
    wired_limit_mb: int | None = None


def read_machine() -> Machine:
    """The machine this runs on. Imports mlx; raises what that import raises."""
    import mlx.core as mx

    mac = platform.system() == "Darwin"
    device, info = mx.default_device(), mx.device_info()
    gpu_memory = info.get("max_recommended_working_set_size")
    return Machine(
        system="macOS" if mac else platform.system(),
        system_version=platform.mac_ver()[0] if mac else platform.release(),
        processor=platform.machine(),
        device=f"{info.get('device_name', 'unknown')} ({device.type.name})",
        gpu=device.type == mx.DeviceType.gpu,
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpu_memory=int(gpu_memory) if gpu_memory else None,
        wired_limit_mb=read_wired_limit() if mac else None,
    )


def memory_for_gpu(memory: int) -> int:
    """Bytes of ``memory`` that a Mac's GPU can be given.

    macOS itself keeps 8 GiB, or 1/16 of a large machine.
    """
    return memory - max(8 * 2**30, memory // 16)


def read_wired_limit(command: tuple[str, ...] = ("/usr/sbin/sysctl",)) -> int | None:
    """macOS: ``iogpu.wired_limit_mb``; None if the system does not tell."""
    try:
        answer = subprocess.run(
            [*command, "-n", "iogpu.wired_limit_mb"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        return int(answer.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
