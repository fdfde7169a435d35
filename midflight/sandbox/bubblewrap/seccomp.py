"""The system calls a program may make, as the BPF instructions that the kernel checks each call against.

An allowlist: a call that is not on it does not exist (ENOSYS), also one that a later kernel adds; what is refused on
purpose says so (EPERM). Calls of another architecture (32 bits) end the process.
"""

from __future__ import annotations

import errno
import functools
import os
import socket

FILES = """
access chdir chmod chown close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2 fadvise64
fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat fdatasync fgetxattr flistxattr flock fremovexattr
fsetxattr fstat fstatfs fsync ftruncate futimesat getcwd getdents getdents64 getxattr ioctl lchown lgetxattr link
linkat listxattr llistxattr lremovexattr lseek lsetxattr lstat mkdir mkdirat mknod mknodat newfstatat open openat
openat2 pipe pipe2 pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv
removexattr rename renameat renameat2 rmdir sendfile setxattr splice stat statfs statx symlink symlinkat
sync_file_range truncate umask unlink unlinkat utime utimensat utimes write writev
"""
MEMORY = "brk madvise membarrier mincore mmap mprotect mremap msync munmap pkey_alloc pkey_free pkey_mprotect"
PROCESSES = """
alarm arch_prctl capget execve execveat exit exit_group fork get_robust_list get_thread_area getcpu getegid geteuid
getgid getgroups getitimer getpgid getpgrp getpid getppid getpriority getresgid getresuid getrlimit getrusage getsid
gettid getuid kill pause pidfd_open pidfd_send_signal prctl restart_syscall rseq rt_sigaction rt_sigpending
rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max
sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval
sched_setaffinity sched_yield seccomp set_robust_list set_thread_area set_tid_address setgid setgroups setitimer
setpgid setpriority setregid setresgid setresuid setreuid setrlimit setsid setuid sigaltstack sysinfo tgkill times
tkill uname vfork wait4 waitid futex futex_waitv futex_wait futex_wake futex_requeue getrandom
"""
TIME = """
clock_getres clock_gettime clock_nanosleep gettimeofday nanosleep time timer_create timer_delete timer_getoverrun
timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime
"""
WAITING = """
epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 poll ppoll pselect6 select
signalfd signalfd4
"""
SOCKETS = """
accept accept4 bind connect getpeername getsockname getsockopt listen recvfrom recvmmsg recvmsg sendmmsg sendmsg
sendto setsockopt shutdown
"""
"""Of sockets that exist: only those of the family AF_UNIX can be made."""
FCNTL = (*range(12), *range(36, 39), *range(1030, 1037))
"""What fcntl may do: descriptors, flags, locks, signals, pipes, seals, hints."""
LEASES = range(1024, 1027)
"""What it may not: leases, by which one session could have others, and the agent, wait for a shared file; and notices
of changes in shared folders."""
REFUSED = """
acct add_key adjtimex bpf chroot clock_adjtime clock_settime delete_module fanotify_init finit_module fsmount fsopen
init_module inotify_init inotify_init1 io_setup io_uring_enter io_uring_register io_uring_setup ioperm iopl kcmp
kexec_file_load kexec_load keyctl lookup_dcookie mbind memfd_create memfd_secret migrate_pages mount mount_setattr
move_mount move_pages mq_open msgget name_to_handle_at open_by_handle_at open_tree perf_event_open personality
pidfd_getfd pivot_root process_madvise process_vm_readv process_vm_writev ptrace quotactl reboot request_key semget
set_mempolicy setdomainname setfsgid setfsuid sethostname setns settimeofday shmget swapoff swapon syslog umount2
unshare userfaultfd vhangup
"""
NAMESPACES = 0x7E020080
"""The CLONE_NEW* flags of clone."""


@functools.cache
def instructions() -> bytes:
    """The filter for this machine, `struct sock_filter` after `struct sock_filter`.

    Raises:
        ImportError: pyseccomp is not installed.
        RuntimeError: libseccomp is not.
    """
    import pyseccomp

    native = pyseccomp.Arch.NATIVE

    def known(names: str) -> list[str]:
        return [name for name in names.split() if pyseccomp.resolve_syscall(native, name) >= 0]

    rules = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.ENOSYS))
    for name in known(" ".join((FILES, MEMORY, PROCESSES, TIME, WAITING, SOCKETS))):
        rules.add_rule(pyseccomp.ALLOW, name)
    for name in known(REFUSED):
        rules.add_rule(pyseccomp.ERRNO(errno.EPERM), name)
    for name in ("socket", "socketpair"):
        rules.add_rule(pyseccomp.ALLOW, name, pyseccomp.Arg(0, pyseccomp.EQ, int(socket.AF_UNIX)))
        rules.add_rule(pyseccomp.ERRNO(errno.EACCES), name, pyseccomp.Arg(0, pyseccomp.NE, int(socket.AF_UNIX)))
    for commands, answer in ((FCNTL, pyseccomp.ALLOW), (LEASES, pyseccomp.ERRNO(errno.EPERM))):
        for command in commands:
            rules.add_rule(answer, "fcntl", pyseccomp.Arg(1, pyseccomp.EQ, command))
    rules.add_rule(pyseccomp.ALLOW, "prlimit64", pyseccomp.Arg(0, pyseccomp.EQ, 0))  # its own, not the holder's
    rules.add_rule(pyseccomp.ERRNO(errno.EPERM), "prlimit64", pyseccomp.Arg(0, pyseccomp.NE, 0))
    rules.add_rule(pyseccomp.ALLOW, "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, NAMESPACES, 0))
    for bit in range(32):
        if NAMESPACES >> bit & 1:
            flag = pyseccomp.Arg(0, pyseccomp.MASKED_EQ, 1 << bit, 1 << bit)
            rules.add_rule(pyseccomp.ERRNO(errno.EPERM), "clone", flag)
    descriptor = os.memfd_create("filter")
    with open(descriptor, "w+b") as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
