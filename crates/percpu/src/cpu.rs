//! The CPU of the calling thread, and the number of CPUs.
//!
//! Every call of [`current_cpu`] tries these in this order:
//!
//! ```text
//!  rseq area: cpu_id < possible? --no--> sched_getcpu() >= 0? --no--> CPU 0
//!        | yes                                | yes: modulo possible
//!        v                                    v
//!      CpuId                                CpuId
//! ```
//!
//! # Invariants
//!
//! 1. A `CpuId` made here is below [`possible_cpus`], which is at least 1 and never changes.

#[doc(inline)]
pub use offlock_sync::CpuId;
#[cfg(offlock_virtual_cpu)]
use offlock_sync::virtual_cpu as imp;

/// Returns the CPU that the calling thread runs on.
///
/// The answer is a hint, since the thread may migrate before it is used. Choose a slot by it, and
/// let the slot's own lock or atomic decide. The index is always below [`possible_cpus`].
///
/// If neither rseq nor `sched_getcpu` has an answer, it is CPU 0: any thread may use any slot.
#[inline]
#[must_use]
pub fn current_cpu() -> CpuId {
    imp::current()
}

/// Returns a CPU that the calling thread was on lately, for slots that any CPU may change by
/// atomics.
///
/// The same as [`current_cpu`] if rseq keeps the id. Otherwise `sched_getcpu` would cost as much as
/// the atomic that follows, so one call serves several answers.
#[inline]
pub(crate) fn recent_cpu() -> CpuId {
    imp::recent()
}

/// Returns the number of slots of an array indexed by CPU: one more than the largest number of a CPU
/// that this machine may ever have. Offline CPUs and holes between the numbers count.
///
/// The kernel fixes the possible CPUs at boot: hotplug and a changed cpuset add none. The first call
/// reads `/sys/devices/system/cpu/possible`; if it cannot, it uses the number of configured CPUs.
#[inline]
#[must_use]
pub fn possible_cpus() -> usize {
    imp::possible()
}

/// Returns whether this process reads rseq ids, and if not, why.
pub(crate) fn rseq_ids() -> Result<(), &'static str> {
    #[cfg(offlock_virtual_cpu)]
    return Err("the CPUs are virtual");
    #[cfg(not(offlock_virtual_cpu))]
    imp::rseq_ids()
}

/// The CPUs of the machine.
#[cfg(not(offlock_virtual_cpu))]
mod imp {
    use std::cell::Cell;
    use std::fs;

    use offlock_sync::native::OnceLock;
    use offlock_sync::native::atomic::{AtomicU32, Ordering};

    use super::*;
    #[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(offlock_portable)))]
    use crate::rseq::area;

    /// A build without the assembly reads no ids.
    #[cfg(not(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(offlock_portable))))]
    mod area {
        pub(super) fn current() -> Option<crate::CpuId> {
            None
        }

        pub(super) fn start_ids(_: u32) -> Result<(), &'static str> {
            Err("not in this build")
        }
    }

    /// One past the largest CPU number that is accepted. Eight times the largest number of
    /// CPUs of an x86_64 kernel (8192). Without a limit a garbled file would cause gigabytes of
    /// allocation.
    const MAX_CPUS: u32 = 65_536;

    /// The number of answers that [`recent`] gives for one call of `sched_getcpu`.
    const REUSE_LIMIT: u32 = 32;

    /// The number of possible CPUs, or 0 before the first call of [`possible`].
    static POSSIBLE: AtomicU32 = AtomicU32::new(0);

    #[inline(always)]
    pub(super) fn current() -> CpuId {
        area::current().unwrap_or_else(current_slow)
    }

    #[inline]
    pub(super) fn recent() -> CpuId {
        std::thread_local! {
            // Nothing to drop, so it can be read at any point of a thread's exit.
            static LAST: Cell<(CpuId, u32)> = const { Cell::new((CpuId::new(0), 0)) };
        }
        if let Some(cpu) = area::current() {
            return cpu;
        }
        LAST.with(|last| {
            let (cpu, left) = match last.get() {
                (_, 0) => (current_slow(), REUSE_LIMIT),
                known => known,
            };
            last.set((cpu, left - 1));
            cpu
        })
    }

    /// The first call decides.
    pub(super) fn rseq_ids() -> Result<(), &'static str> {
        static IDS: OnceLock<Result<(), &'static str>> = OnceLock::new();
        *IDS.get_or_init(|| area::start_ids(possible() as u32))
    }

    #[inline(always)]
    pub(super) fn possible() -> usize {
        // Ordering: Relaxed; the number publishes nothing else.
        match POSSIBLE.load(Ordering::Relaxed) {
            0 => count_possible(),
            known => known as usize,
        }
    }

    /// Handles the first call of the process, a thread without an rseq id, and a process without
    /// rseq.
    #[cold]
    #[inline(never)]
    fn current_slow() -> CpuId {
        let _ = rseq_ids();
        // The first call of the process comes here although the area has an id.
        area::current().unwrap_or_else(|| without_rseq(getcpu(), possible() as u32))
    }

    /// Returns the slot of a thread whose rseq area has no id. `getcpu` is the result of
    /// `sched_getcpu`.
    fn without_rseq(getcpu: i32, capacity: u32) -> CpuId {
        let id = u32::try_from(getcpu).unwrap_or(0);
        // A CPU that `/sys` did not list shares the slot of another CPU: slower, never out of bounds.
        CpuId::new(id % capacity)
    }

    /// Returns the CPU as libc knows it, or a negative number.
    fn getcpu() -> i32 {
        // SAFETY: takes no arguments and writes no memory of this program; it reports errors by -1.
        unsafe { libc::sched_getcpu() }
    }

    #[cold]
    #[inline(never)]
    fn count_possible() -> usize {
        let text = fs::read_to_string("/sys/devices/system/cpu/possible");
        let found = text.ok().and_then(|text| after_last(&text)).unwrap_or_else(configured_cpus);
        // Ordering: Relaxed, both; the number publishes nothing else. The first thread decides, because
        // two threads may guess differently.
        match POSSIBLE.compare_exchange(0, found, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => found as usize,
            Err(first) => first as usize,
        }
    }

    /// Returns one more than the largest number in the kernel's list format, such as `0-3,8,10-11`.
    /// Returns `None` if the text has another format, or a number that is not below [`MAX_CPUS`].
    fn after_last(text: &str) -> Option<u32> {
        let number = |digits: &str| {
            // `u32::from_str` would accept a plus sign.
            let plain = digits.bytes().all(|byte| byte.is_ascii_digit());
            plain.then(|| digits.parse().ok()).flatten().filter(|&cpu: &u32| cpu < MAX_CPUS)
        };
        let mut numbers = text.trim().split([',', '-']).map(number);
        numbers.try_fold(0, |last: u32, cpu| Some(last.max(cpu? + 1)))
    }

    /// Returns the number of slots for a machine without `/sys`: the count of libc. A higher CPU shares
    /// the slot of another.
    fn configured_cpus() -> u32 {
        // SAFETY: takes a number and returns one, -1 for an error.
        let counted = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF) };
        u32::try_from(counted).unwrap_or(0).clamp(1, MAX_CPUS)
    }

    #[cfg(test)]
    mod tests {
        use proptest::prelude::*;

        use super::*;

        proptest! {
            #[test]
            fn inv01_any_getcpu_answer_gives_a_slot_below_capacity(
                getcpu in prop_oneof![any::<i32>(), -2..200],
                capacity in prop_oneof![1_u32..200, 1_u32..=65_536],
            ) {
                let cpu = without_rseq(getcpu, capacity);
                prop_assert!(cpu.get() < capacity);
                if (0..capacity as i32).contains(&getcpu) {
                    prop_assert_eq!(cpu.get(), getcpu as u32, "an id that fits is kept");
                }
                if getcpu < 0 {
                    prop_assert_eq!(cpu.get(), 0, "an error gives CPU 0");
                }
            }
        }

        /// A thread is pinned to one CPU after the other. The answer follows by the last of `REUSE_LIMIT`
        /// calls, and at once if rseq keeps the id.
        #[test]
        fn recent_cpu_is_renewed_within_its_limit() {
            use testkit::pin::{allowed_cpus, pin_to};

            let hop = || {
                for cpu in allowed_cpus().into_iter().cycle().take(200) {
                    pin_to(&[cpu]);
                    let calls = if rseq_ids().is_ok() { 1 } else { REUSE_LIMIT };
                    let seen: Vec<CpuId> = (0..calls).map(|_| recent()).collect();
                    assert!(seen.iter().all(|seen| seen.get() < possible() as u32));
                    assert_eq!(seen.last(), Some(&CpuId::new(cpu as u32)), "{:?}", rseq_ids());
                }
            };
            // A new thread, because it stays pinned.
            std::thread::spawn(hop).join().unwrap();
        }

        #[test]
        fn inv01_every_number_in_the_list_of_possible_cpus_is_below_the_count() {
            for (text, count) in [
                ("0\n", Some(1)),
                ("0-3\n", Some(4)),
                ("0-1,8,10-11\n", Some(12)),
                ("10-11,0-1", Some(12)),
                ("65535", Some(MAX_CPUS)),
            ] {
                assert_eq!(after_last(text), count, "{text:?}");
            }
            for text in
                ["", "\n", "pony\n", "1,", "-1", "1--2", "+1", "1 2", "0-65536", "0-4294967296"]
            {
                assert_eq!(after_last(text), None, "{text:?}");
            }
        }
    }
}
