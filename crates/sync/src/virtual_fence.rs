//! Asymmetric fences for models.
//!
//! A model runs with one of the two strategies of [`asymmetric`](crate::asymmetric):
//!
//! - Membarrier, like most programs, in [`with_membarrier`]. Each thread has a *token*, an atomic. [`light`] is a
//!   read-modify-write of the calling thread's token, and [`heavy`] one of every token. So a `light`
//!   and a `heavy` are ordered by the token of the thread that calls `light`, and two `heavy` by the
//!   tokens of all threads. Two `light` of different threads have no token in common, so nothing
//!   orders them.
//! - Fences on both sides, elsewhere: both are `fence(SeqCst)`. loom orders any two such fences, and whatever
//!   precedes the first happens before whatever follows the second. A fence of loom is also not a
//!   point at which the schedule may change: no thread runs between a fence and the access before
//!   it. So a model with this strategy cannot fail for some bugs that a program with it has.
//!
//! A read-modify-write of a token also synchronises, which a compiler fence and a membarrier do not.
//! So a model may miss that an access beside a fence must be a Release or an Acquire, if each of its
//! runs orders the two threads by a token. Sometimes a token also orders two `light` with a `heavy`
//! between them, which is more than the kernel promises.
//!
//! shuttle is sequentially consistent. There the strategies differ only in the paths that a program
//! takes because of the strategy.

use std::cell::Cell;

std::thread_local! {
    // One per model, because both checkers run all threads of a model on one OS thread.
    static MEMBARRIER: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether this model runs with membarrier, and not with fences on both sides.
pub(crate) fn membarrier() -> bool {
    MEMBARRIER.get()
}

/// Runs the models in `run` with membarrier.
pub fn with_membarrier(run: impl FnOnce()) {
    MEMBARRIER.set(true);
    run();
    MEMBARRIER.set(false);
}

/// Runs the models in `run` with each of the two strategies.
pub fn both_strategies(run: impl Fn()) {
    with_membarrier(&run);
    run();
}

pub(super) use self::imp::begin_run;
pub(crate) use self::imp::{compiler_fence, heavy, light};

#[cfg(offlock_shuttle)]
mod imp {
    use shuttle::sync::atomic::{Ordering, fence};

    pub(crate) fn begin_run() {}

    pub(crate) fn compiler_fence() {}

    pub(crate) fn light() {
        fence(Ordering::SeqCst);
    }

    pub(crate) fn heavy() {
        fence(Ordering::SeqCst);
    }
}

#[cfg(offlock_loom)]
mod imp {
    use std::cell::Cell;

    use loom::sync::atomic::{AtomicU64, Ordering, fence};
    use loom::{lazy_static, thread_local};

    use super::membarrier;

    /// The most threads of a model.
    const THREADS: usize = loom::MAX_THREADS;

    struct Tokens {
        /// Changed by every `heavy`, for threads that take their token later.
        heavy: AtomicU64,
        of_threads: [AtomicU64; THREADS],
    }

    lazy_static! {
        static ref TOKENS: Tokens = Tokens {
            heavy: AtomicU64::new(0),
            of_threads: [(); THREADS].map(|()| AtomicU64::new(0)),
        };
    }

    std::thread_local! {
        // Not loom's: the number of tokens that the threads of this run have taken. A run takes them
        // in an order that its schedule decides, like everything else in it.
        static TAKEN: Cell<usize> = const { Cell::new(0) };
    }

    thread_local! {
        /// The number of this thread's token, if it has one.
        static MINE: Cell<Option<usize>> = Cell::new(None);
    }

    /// Begins a run: no thread has a token.
    pub(crate) fn begin_run() {
        TAKEN.set(0);
        if membarrier() {
            // Made here, because the first access to a `lazy_static` happens before every later one.
            let _ = &*TOKENS;
        }
    }

    /// Gives the calling thread a token.
    fn take() -> usize {
        let mine = TAKEN.replace(TAKEN.get() + 1);
        MINE.with(|cell| cell.set(Some(mine)));
        // Ordering: Acquire pairs with the AcqRel in `heavy`; it carries what the threads did that
        // called `heavy` before this thread had a token.
        TOKENS.heavy.fetch_add(0, Ordering::Acquire);
        mine
    }

    pub(crate) fn light() {
        if membarrier() {
            token();
        } else {
            // Ordering: SeqCst fence, against the fence in `heavy`: the loads after the later of the
            // two see the stores before the earlier.
            fence(Ordering::SeqCst);
        }
    }

    /// What `light` does with membarrier. The other strategy needs no compiler fence, because no
    /// checker reorders the accesses of one thread.
    pub(crate) fn compiler_fence() {
        if membarrier() {
            token();
        }
    }

    fn token() {
        let mine = MINE.with(Cell::get).unwrap_or_else(take);
        // Ordering: AcqRel pairs with the AcqRel in `heavy`, both ways.
        TOKENS.of_threads[mine].fetch_add(0, Ordering::AcqRel);
    }

    pub(crate) fn heavy() {
        if !membarrier() {
            // Ordering: SeqCst fence, against the fences in `light` and in this function: the loads
            // after the later of two fences see the stores before the earlier.
            return fence(Ordering::SeqCst);
        }
        // Ordering: AcqRel, both, pairs with the AcqRel in `token` and in this function, both ways.
        TOKENS.heavy.fetch_add(0, Ordering::AcqRel);
        let mut next = 0;
        let mine = MINE.with(Cell::get);
        while next < TAKEN.get() {
            if mine != Some(next) {
                TOKENS.of_threads[next].fetch_add(0, Ordering::AcqRel);
            }
            next += 1;
        }
    }
}
