# pyright: basic
"""Programs that try to end, stop or wake another process."""

import ctypes
import fcntl
import os
import signal

LIBC = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"
QUEUE, TIMER = (129, 222) if X86 else (138, 107)


def kill_the_gateway(at):
    os.kill(at["gateway"], signal.SIGKILL)
    return True


def kill_all(at):
    os.kill(-1, signal.SIGKILL)
    return False


def kill_own_group(at):
    os.killpg(0, signal.SIGKILL)
    return True


def kill_parent(at):
    os.kill(os.getppid() or 1, signal.SIGKILL)
    return False


def signal_to_a_thread_of_the_first_process(at):
    """It may signal itself so, and so this call is allowed; the first process ignores it."""
    number = 234 if X86 else 131
    for signal_number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGCHLD):
        LIBC.syscall(number, 1, 1, signal_number)
    threads = [(pid, pid) for pid in range(3, 64)] + [(at["gateway"], at["gateway"])]
    return any(LIBC.syscall(number, *thread, 0) == 0 for thread in threads if os.getpid() != 1)


def stop_all(at):
    for pid in range(1, 100):
        if pid != os.getpid():
            try:
                os.kill(pid, signal.SIGSTOP)
            except OSError:
                continue
    return False


def signal_by_descriptor(at):
    descriptor = os.pidfd_open(1)
    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    return True


def queued_signal(at):
    """A signal with a forged sender."""
    information = (ctypes.c_int * 32)(signal.SIGTERM, 0, -1, at["gateway"])
    return LIBC.syscall(QUEUE, 1, signal.SIGTERM, information) == 0


def signal_when_a_pipe_is_ready(at):
    reader, writer = os.pipe()
    fcntl.fcntl(reader, fcntl.F_SETOWN, 1)
    fcntl.fcntl(reader, 10, signal.SIGKILL)
    fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC)
    os.write(writer, b"x")
    return True


def signal_at_the_parents_death(at):
    return LIBC.prctl(1, signal.SIGUSR1, 0, 0, 0) == 0


def timer_of_the_kernel(at):
    event = (ctypes.c_int * 16)(0, 0, signal.SIGUSR1, 4, 1)
    made = ctypes.c_int()
    return LIBC.syscall(TIMER, 1, event, ctypes.byref(made)) == 0


def session_of_its_own(at):
    os.setsid()
    return True


def group_of_another(at):
    os.setpgid(0, 1)
    return True


def terminal_of_another(at):
    for descriptor in range(64):
        try:
            fcntl.ioctl(descriptor, 0x5412, b"x")
        except OSError:
            continue
        return True
    return False
