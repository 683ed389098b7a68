//! Threads without a registered rseq area, like a thread that libc did not make. In a module of its
//! own for its assembly and its `unsafe`, which the tests of two crates need.

/// Unregisters the calling thread's rseq area. Returns the CPU id that the kernel leaves in it.
///
/// # Panics
///
/// Panics if libc registered no area.
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), target_env = "gnu"))]
pub fn unregister() -> i32 {
    use std::arch::asm;
    use std::io;

    const UNREGISTER: libc::c_int = 1; // RSEQ_FLAG_UNREGISTER
    /// What glibc registers with.
    const SIGNATURE: u32 = if cfg!(target_arch = "x86_64") { 0x5305_3053 } else { 0xd428_bc00 };
    const SYMBOL: &std::ffi::CStr = c"__rseq_offset";

    // SAFETY: looks up a name; null if no library exports it.
    let offset = unsafe { libc::dlsym(libc::RTLD_DEFAULT, SYMBOL.as_ptr()) };
    assert!(!offset.is_null(), "no library exports __rseq_offset");
    // SAFETY: libc's `const ptrdiff_t`, written before `main`.
    let offset = unsafe { *offset.cast::<isize>() };
    let thread_pointer: usize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the first word of a thread's control block points to itself (ABI).
    unsafe {
        asm!("mov {}, fs:[0]", out(reg) thread_pointer, options(nostack, readonly))
    };
    #[cfg(target_arch = "aarch64")]
    // SAFETY: reads a register that each thread has.
    unsafe {
        asm!("mrs {}, tpidr_el0", out(reg) thread_pointer, options(nostack, readonly))
    };
    let area = thread_pointer.wrapping_add_signed(offset);

    // glibc registers 32 bytes up to 2.39, and from 2.40 on the size that the kernel gives in
    // AT_RSEQ_FEATURE_SIZE, rounded up.
    const AT_RSEQ_FEATURE_SIZE: u64 = 27;
    // SAFETY: reads an entry of the auxiliary vector; 0 if there is none.
    let kernel = unsafe { libc::getauxval(AT_RSEQ_FEATURE_SIZE) };
    for size in [32, kernel.next_multiple_of(32)] {
        // SAFETY: the kernel forgets the area; this thread is in no rseq section now.
        let rc = unsafe { libc::syscall(libc::SYS_rseq, area, size as u32, UNREGISTER, SIGNATURE) };
        if rc == 0 {
            let cpu_id = (area + 4) as *const i32;
            // SAFETY: the area stays allocated as long as the thread. The read is volatile because
            // the kernel wrote the id, which the compiler cannot see.
            return unsafe { cpu_id.read_volatile() };
        }
    }
    panic!("the kernel accepted no size of area: {}", io::Error::last_os_error());
}
