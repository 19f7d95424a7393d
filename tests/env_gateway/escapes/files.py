# pyright: basic
"""Programs that try to read what is not theirs, or to leave something behind. Each reports whether
it did."""

import ctypes
import glob
import json
import os
import sqlite3
import sys

LIBC = ctypes.CDLL(None, use_errno=True)


def readable(*paths):
    """Print what could be read, so that the test finds it in the output."""
    found = False
    for path in paths:
        try:
            with open(path, "rb") as file:
                print(path, file.read(4096))
            found = True
        except OSError as error:
            print(path, error)
    return found


def environment(at):
    print(dict(os.environ))
    return bool(os.environ.keys() - {"LC_CTYPE", "PWD"})


def environment_in_c(at):
    getenv = LIBC.getenv
    getenv.restype = ctypes.c_char_p
    print(getenv(at["variable"].encode()))
    return getenv(at["variable"].encode()) is not None


def own_proc(at):
    return readable("/proc/self/environ", "/proc/self/maps", "/proc/self/mountinfo")


def first_process(at):
    return readable("/proc/1/environ", "/proc/1/cmdline", "/proc/1/root/etc/passwd")


def parent(at):
    return readable(f"/proc/{os.getppid()}/environ", f"/proc/{at['gateway']}/environ")


def every_process(at):
    return readable(*glob.glob("/proc/*/environ"), *glob.glob("/proc/[0-9]*/cmdline"))


def accounts(at):
    return readable("/etc/shadow", "/etc/passwd", "/etc/hosts", "/etc/machine-id")


def secret_file(at):
    return readable(at["secret"])


def secret_by_symlink(at):
    for folder in ("/tmp", "/", "/dev/shm", "/verifier"):
        link = os.path.join(folder, "link")
        try:
            os.symlink(at["secret"], link)
        except OSError:
            continue
        return readable(link)
    return False


def secret_through_inherited_descriptors(at):
    """A directory that was left open would lead out of any file system."""
    for descriptor in range(3, 64):
        try:
            os.open("../../../../../../etc/passwd", os.O_RDONLY, dir_fd=descriptor)
        except OSError:
            continue
        return True
    return False


def repository(at):
    return readable(at["repository"] + "/pyproject.toml", "/verifier/pyproject.toml")


def repository_by_import(at):
    from flotilla_common.telemetry import log

    return log is not None


def packages_by_import(at):
    import grpc

    return grpc is not None


def homes(at):
    for folder in ("/home", "/work", "/opt", "/srv", "/run", "/var", "/boot", "/sys", "/mnt"):
        if os.path.exists(folder):
            print(folder, os.listdir(folder))
            return True
    return readable("/root/.bashrc", "/root/.profile", "/root/.ssh/id_rsa", "/root/.netrc")


def devices(at):
    return readable("/dev/mem", "/dev/kmsg", "/dev/sda", "/dev/vda", "/dev/tty", "/dev/null")


def files_through_sqlite(at):
    database = sqlite3.connect(":memory:")
    database.execute("ATTACH DATABASE ? AS other", (at["database"],))
    print(database.execute("SELECT * FROM other.secrets").fetchall())
    return True


def extension_through_sqlite(at):
    database = sqlite3.connect(":memory:")
    database.enable_load_extension(True)
    database.load_extension("/lib/x86_64-linux-gnu/libc.so.6")
    return True


def written(at, act):
    """Try `act` on a new name in every possible folder."""
    folders = [at["folder"], "/", "/tmp", "/var/tmp", "/dev/shm", "/run", "/root", "/usr/lib"]
    folders += [
        "/verifier",
        "/verifier/flotilla_env_gateway/verify",
        sys.prefix,
        *sys.path,
    ]
    harm = False
    for folder in folders:
        try:
            act(os.path.join(folder, at["mark"]))
            print("written in", folder)
            harm = True
        except OSError:
            continue
    return harm


def files_everywhere(at):
    def write(path):
        with open(path, "w") as file:
            file.write("x")

    return written(at, write)


def empty_files_everywhere(at):
    return written(at, lambda path: os.close(os.open(path, os.O_CREAT)))


def folders_everywhere(at):
    """Folders have no size, and so no limit on it counts them; they would use up all inodes."""
    return written(at, os.mkdir)


def links_everywhere(at):
    return written(at, lambda path: os.symlink("/", path))


def pipes_everywhere(at):
    return written(at, os.mkfifo)


def device_files(at):
    return written(at, lambda path: os.mknod(path, 0o600 | 0o060000, os.makedev(8, 0)))


def own_code(at):
    """The next verifier would run what is written here."""
    with open("/verifier/flotilla_env_gateway/verify/worker.py", "a") as file:
        file.write("raise SystemExit")
    return True


def anonymous_file(at):
    return os.memfd_create("x") >= 0


def shell_by_subclasses(at):
    """The way around lists of forbidden names."""
    for kind in ().__class__.__base__.__subclasses__():  # pyright: ignore[reportOptionalMemberAccess]
        names = getattr(getattr(kind, "__init__", None), "__globals__", {})
        if "system" in names:
            return names["system"](f"echo x > {at['folder']}/{at['mark']}") == 0
    return False


def files_by_builtins_of_another(at):
    opened = json.codecs.builtins.open  # pyright: ignore[reportAttributeAccessIssue]
    return bool(opened(at["secret"]).read())


def changed_modes_and_times(at):
    for act in (
        lambda: os.chmod(os.__file__, 0o777),
        lambda: os.chown(os.__file__, -1, -1),
        lambda: os.utime(os.__file__),
        lambda: os.setxattr(os.__file__, "user.mark", b"x"),
        lambda: os.truncate(os.__file__, 0),
        lambda: os.rename(os.__file__, os.__file__ + "x"),
        lambda: os.unlink(os.__file__),
    ):
        try:
            act()
        except OSError:
            continue
        return True
    return False


def secret_by_hard_link(at):
    os.link(at["secret"], "/tmp/link")
    return readable("/tmp/link")


def libraries_for_writing(at):
    for path in (
        os.__file__,
        sys.executable,
        "/verifier/flotilla_env_gateway/verify/worker.py",
    ):
        for flags in (os.O_RDWR, os.O_WRONLY | os.O_APPEND, os.O_RDONLY | os.O_TRUNC):
            try:
                os.open(path, flags)
            except OSError:
                continue
            return True
    return False


def library_mapped_for_writing(at):
    """The page is shared with all that map it; at first only for reading."""
    LIBC.mmap.restype = ctypes.c_void_p
    LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library = os.open(os.__file__, os.O_RDONLY)
    address = LIBC.mmap(None, 4096, 1, 1, library, 0)
    os.close(library)
    return LIBC.mprotect(ctypes.c_void_p(address), 4096, 3) == 0


def nameless_file(at):
    for folder in ("/", "/tmp", "/usr", "/verifier", os.path.dirname(os.__file__)):
        try:
            os.open(folder, os.O_TMPFILE | os.O_RDWR)
        except OSError:
            continue
        return True
    return False


def way_out_by_dots(at):
    return readable("/.." * 20 + at["secret"], "/verifier" + "/.." * 20 + at["secret"])


def program_of_the_system(at):
    """Look for the programs of a shell; none exists."""
    return any(os.path.exists(path) for path in ("/bin/sh", "/usr/bin/env", "/usr/bin/bwrap"))


def python_by_another_name(at):
    """Its own environment and command line would be in /proc."""
    return readable(
        f"/proc/{os.getpid()}/cmdline", "/proc/thread-self/environ", "/proc/sys/kernel/osrelease"
    )
