//! A thread without a CPU id, as one that libc did not make.

/// Makes this thread one that libc did not make, as far as rseq can tell. What its id is then, if
/// rseq is in use.
pub(crate) fn take_id() -> Option<i32> {
    #[cfg(all(target_arch = "x86_64", target_env = "gnu", not(offlock_portable)))]
    if percpu::backend().rseq() == percpu::RseqState::InUse {
        return Some(unregister_rseq());
    }
    None
}

/// Gives the calling thread's rseq area back to the kernel, and returns the id it then holds.
#[cfg(all(target_arch = "x86_64", target_env = "gnu", not(offlock_portable)))]
fn unregister_rseq() -> i32 {
    use std::arch::asm;
    use std::io;

    const UNREGISTER: libc::c_int = 1; // RSEQ_FLAG_UNREGISTER
    const SIGNATURE: u32 = 0x5305_3053; // what glibc registers with on x86
    const SYMBOL: &std::ffi::CStr = c"__rseq_offset";

    // SAFETY: looks up a name; null if nobody exports it.
    let offset = unsafe { libc::dlsym(libc::RTLD_DEFAULT, SYMBOL.as_ptr()) };
    assert!(!offset.is_null(), "rseq is in use, and nobody says where");
    // SAFETY: libc's `const ptrdiff_t`, written before `main`.
    let offset = unsafe { *offset.cast::<isize>() };
    let thread_pointer: usize;
    // SAFETY: the first word of a thread's control block points to itself (x86_64 ABI).
    unsafe { asm!("mov {}, fs:[0]", out(reg) thread_pointer, options(nostack, readonly)) };
    let area = thread_pointer.wrapping_add_signed(offset);

    // glibc registers 32 bytes up to 2.39, and from 2.40 on what the kernel asks for in AT_RSEQ.
    const AT_RSEQ_FEATURE_SIZE: u64 = 27;
    // SAFETY: reads an entry of the auxiliary vector; 0 if there is none.
    let kernel = unsafe { libc::getauxval(AT_RSEQ_FEATURE_SIZE) };
    for size in [32, kernel.next_multiple_of(32)] {
        // SAFETY: the kernel forgets the area; nothing in this thread is inside a section.
        let rc = unsafe { libc::syscall(libc::SYS_rseq, area, size as u32, UNREGISTER, SIGNATURE) };
        if rc == 0 {
            let cpu_id = (area + 4) as *const i32;
            // SAFETY: the area stays allocated as long as the thread; `volatile` because the
            // kernel wrote it behind the compiler's back.
            return unsafe { cpu_id.read_volatile() };
        }
    }
    panic!("no size of area was accepted: {}", io::Error::last_os_error());
}
