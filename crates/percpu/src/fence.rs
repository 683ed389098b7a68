//! Asymmetric fences: the frequent side costs almost nothing, the rare side costs a system call.
//!
//! Two threads each store to one place and then load the other's place. If both run a full fence in
//! between, at least one thread sees the other's store. [`light`] and [`heavy`] give the same
//! guarantee, for a `light` and a `heavy` and for two `heavy`, at other prices. `light` only keeps
//! the compiler from moving the load before the store. `heavy` makes the kernel (`membarrier`,
//! private and expedited) run a full fence on every CPU that runs a thread of this process at that
//! moment.
//!
//! ```text
//!   reader                          writer
//!   store(active, 1)                store(pointer, new)
//!   light()                         heavy()
//!   load(pointer)                   load(active)          never the old pointer and inactive both
//! ```
//!
//! Two `light` order nothing between them, and neither side is an Acquire or a Release. The
//! orderings of the accesses themselves order the reads through the pointer.
//!
//! If the kernel refuses membarrier, both sides are `fence(SeqCst)`. The first call of `heavy` or
//! [`capabilities`](crate::capabilities) decides this for the process.
//!
//! ```
//! use offlock_percpu::fence;
//! use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
//!
//! static ACTIVE: AtomicBool = AtomicBool::new(false);
//! static STOP: AtomicBool = AtomicBool::new(false);
//!
//! // The reader, often: it either sees `STOP`, or the writer sees `ACTIVE`.
//! ACTIVE.store(true, Relaxed);
//! fence::light();
//! assert!(!STOP.load(Relaxed));
//!
//! // The writer, seldom.
//! STOP.store(true, Relaxed);
//! fence::heavy();
//! assert!(ACTIVE.load(Relaxed));
//! ```

pub(crate) use offlock_sync::asymmetric::{compiler_fence, has_membarrier};
#[doc(inline)]
pub use offlock_sync::asymmetric::{heavy, heavy_rseq, light};
