//! `offlock_sync`, and the CPUs: those of the machine, or those of a model.

pub use offlock_sync::*;

/// The CPUs of the machine, or with `--cfg offlock_virtual_cpu` those that the test sets.
#[cfg(not(any(offlock_loom, offlock_shuttle)))]
pub mod cpu {
    pub use crate::cpu::current_cpu as current;
    #[cfg(not(offlock_virtual_cpu))]
    pub(crate) use crate::cpu::recent_cpu as recent;
    /// The number of slots of an array indexed by CPU: one more than the largest possible CPU
    /// number.
    pub use crate::topology::capacity as possible;
    #[cfg(offlock_virtual_cpu)]
    pub(crate) use current as recent;
}

#[cfg(any(offlock_loom, offlock_shuttle))]
pub use offlock_sync::virtual_cpu as cpu;
