//! The mechanisms that this process can use, and why it lacks the rest.

use std::fmt;

use offlock_sync::native::OnceLock;

use crate::cpu::rseq_ids;
use crate::fence;
use crate::rseq;
use crate::words::Words;

/// The mechanisms that the structures of this crate use in this process: each is `Ok` if it is in
/// use, and otherwise says why not. `Display` gives one line. See [`capabilities`].
///
/// ```
/// let found = offlock_percpu::capabilities();
/// if let Err(why) = found.sections {
///     eprintln!("counters change by atomics: {why}"); // for example: not registered by libc
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Whether [`current_cpu`](crate::current_cpu) reads the id that the kernel keeps in each
    /// thread's rseq area. Otherwise it calls `sched_getcpu`.
    pub rseq_ids: Result<(), &'static str>,
    /// Whether rseq sections change the per-CPU words. Otherwise atomics do.
    pub sections: Result<(), &'static str>,
    /// Whether [`fence::heavy`] is a membarrier. Otherwise it and [`fence::light`] are fences.
    pub membarrier: Result<(), &'static str>,
}

impl fmt::Display for Capabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rseq_ids, sections, membarrier } = self;
        let parts = [("rseq ids", rseq_ids), ("sections", sections), ("membarrier", membarrier)];
        for (at, (name, state)) in parts.into_iter().enumerate() {
            let comma = if at == 0 { "" } else { ", " };
            match state {
                Ok(()) => write!(f, "{comma}{name} in use")?,
                Err(why) => write!(f, "{comma}{name} off: {why}")?,
            }
        }
        Ok(())
    }
}

/// Returns the mechanisms that the structures of this crate use in this process.
///
/// Decided once. The first call reads `/sys`, registers the process with membarrier and runs a
/// self-test of the sections. It allocates, and threads that call at the same time wait for it. A
/// program that cannot afford to run out of memory later calls this function at its start.
#[must_use]
pub fn capabilities() -> Capabilities {
    static STARTED: OnceLock<()> = OnceLock::new();
    // Counts the CPUs and maps the first words.
    STARTED.get_or_init(|| drop(Words::new()));
    let reason = "missing, or refused by the kernel or a filter";
    let membarrier = fence::has_membarrier().then_some(()).ok_or(reason);
    Capabilities { rseq_ids: rseq_ids(), sections: rseq::state(), membarrier }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inv14_parts_agree_and_name_their_reasons() {
        let all = capabilities();
        assert_eq!(all, capabilities(), "decided once");
        if all.sections.is_ok() {
            assert_eq!((all.rseq_ids, all.membarrier), (Ok(()), Ok(())), "{all}");
        }
        let off = Capabilities { rseq_ids: Ok(()), sections: Err("a"), membarrier: Err("b") };
        assert_eq!(off.to_string(), "rseq ids in use, sections off: a, membarrier off: b");
    }
}
