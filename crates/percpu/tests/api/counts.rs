//! `PercpuRef` and `RefBlock` on threads that exit, migrate or have no CPU id, and in a storm against a
//! ledger: threads get, clone and put references of objects while other threads kill them.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering::*};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use offlock_percpu::{PercpuRef, RefBlock, Reference, capabilities, fence, rcu};

use crate::rcu::alone;
use crate::threads::{hop, take_id};
use testkit::pin::{allowed_cpus, on};
use testkit::rng::{self, Rng};
use testkit::stress::{keep_running, stress_time};

fn counting() -> (PercpuRef, Arc<AtomicUsize>) {
    let released = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&released);
    (PercpuRef::new(move || _ = count.fetch_add(1, SeqCst)), released)
}

#[test]
fn inv07_a_second_kill_says_what_c_would() {
    let (refs, _) = counting();
    refs.kill().unwrap();
    let error: std::io::Error = refs.kill().unwrap_err().into();
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
}

/// References taken on one CPU and put on another, by threads that end before the kill.
#[test]
fn inv15_exited_threads_leave_the_count_right() {
    let (refs, released) = counting();
    let cpus = allowed_cpus();
    let on_new_thread = |round: usize, f: &(dyn Fn() + Sync)| {
        thread::scope(|scope| _ = scope.spawn(|| on(cpus[round % cpus.len()], f)));
    };
    for round in 0..20 {
        on_new_thread(round, &|| refs.try_get().unwrap().leak());
    }
    refs.kill().unwrap();
    for round in 0..20 {
        assert_eq!(released.load(SeqCst), 0);
        // SAFETY: one of the references leaked above.
        on_new_thread(round + 1, &|| unsafe { PercpuRef::put(&refs) });
    }
    assert_eq!(released.load(SeqCst), 1);
}

/// A put in the destructor of a thread-local variable, late in the exit of the thread.
#[test]
fn inv15_a_reference_in_a_thread_local_is_put_at_exit() {
    thread_local! {
        static KEPT: RefCell<Vec<Reference<'static>>> = const { RefCell::new(Vec::new()) };
    }
    let (refs, released) = counting();
    let refs: &'static PercpuRef = Box::leak(Box::new(refs));
    for id in [true, false] {
        let keep = move || {
            if !id {
                take_id();
            }
            KEPT.with_borrow_mut(|kept| {
                kept.extend([refs.try_get(), refs.try_get()].into_iter().flatten())
            });
        };
        thread::spawn(keep).join().unwrap();
    }
    refs.kill().unwrap();
    assert_eq!(released.load(SeqCst), 1);
}

/// Neither a killed count with a forgotten reference nor a live one releases; the closure is dropped.
#[test]
fn inv07_a_count_that_is_dropped_above_zero_releases_nothing() {
    for killed in [true, false] {
        let (refs, released) = counting();
        if killed {
            std::mem::forget(refs.try_get());
            refs.kill().unwrap();
            assert!(!refs.is_zero());
        }
        drop(refs);
        assert_eq!(released.load(SeqCst), 0);
        assert_eq!(Arc::strong_count(&released), 1, "the closure was dropped, not called");
    }
}

#[test]
fn inv11_a_panic_of_the_release_closure_reaches_the_last_put() {
    let refs = PercpuRef::new(|| panic!("from the closure"));
    let last = refs.try_get().unwrap();
    refs.kill().unwrap();
    let panic = catch_unwind(AssertUnwindSafe(|| drop(last))).unwrap_err();
    assert_eq!(panic.downcast_ref(), Some(&"from the closure"));
    assert!(refs.is_zero() && refs.try_get().is_none());
}

const OPEN: u64 = 5 << 33;

/// Ends the life of count `i`. Returns true if no reference is left.
fn kill(block: &RefBlock, i: usize, gate: &AtomicU64) -> bool {
    gate.store(0, Relaxed);
    fence::heavy_rseq();
    block.fold(i)
}

fn put(block: &RefBlock, i: usize, gate: &AtomicU64) -> bool {
    // SAFETY: each test puts only references that it took, and keeps the block.
    unsafe { RefBlock::put(block, i, gate, OPEN) }
}

/// A fold leaves the words of sections unchanged, and the fold of the next life counts only the difference.
#[test]
fn inv21_each_count_of_a_block_ends_by_itself() {
    let block = RefBlock::try_new().unwrap();
    let gates = [(); RefBlock::COUNTS].map(|()| AtomicU64::new(0));
    for round in 0..3 {
        for (i, gate) in gates.iter().enumerate() {
            assert!(!block.try_get(i, gate, OPEN), "closed");
            block.open(i);
            gate.store(OPEN, Release);
            for _ in 0..=i {
                assert!(block.try_get(i, gate, OPEN) && !block.try_get(i, gate, OPEN + 1));
            }
        }
        for (i, gate) in gates.iter().enumerate() {
            assert!(!put(&block, i, gate));
            assert_eq!(kill(&block, i, gate), i == 0, "round {round}, {i} are left");
            assert!(!block.try_get(i, gate, OPEN) && !block.try_get(i, gate, 1));
            block.get_more(i, gate, OPEN);
            for left in (0..=i).rev() {
                if i > 0 || left > 0 {
                    assert_eq!(put(&block, i, gate), left == 0);
                }
            }
        }
    }
}

#[test]
#[should_panic(expected = "word 64 of 64")]
fn an_index_beyond_the_block_panics() {
    let block = RefBlock::try_new().unwrap();
    let _ = block.try_get(RefBlock::COUNTS, &AtomicU64::new(0), 0);
}

/// What is known of one object.
#[derive(Default)]
struct Account {
    /// The number of references that threads hold.
    inside: AtomicI64,
    /// The last life that began, and the last that ended.
    began: AtomicU64,
    ended: AtomicU64,
}

impl Account {
    fn begin(&self, life: u64) {
        assert_eq!(self.ended.load(SeqCst), self.began.swap(life, SeqCst), "one life at a time");
    }

    fn has_ended(&self) -> bool {
        self.began.load(SeqCst) == self.ended.load(SeqCst)
    }

    /// Checks a reference that the caller holds.
    fn check(&self, life: u64) {
        let (began, ended) = (self.began.load(SeqCst), self.ended.load(SeqCst));
        assert_eq!((began, ended < life), (life, true), "a reference of an ended life");
    }

    fn end(&self, life: u64) {
        assert_eq!(self.inside.load(SeqCst), 0, "ended while a thread has a reference");
        assert_eq!(self.began.load(SeqCst), life);
        assert_ne!(self.ended.swap(life, SeqCst), life, "ended twice");
    }
}

enum Counts {
    /// Each has one life, 1.
    Refs(Vec<PercpuRef>),
    /// The owner opens the counts again and again.
    OfBlock(Box<RefBlock>),
}

/// Objects, each with an account and a gate, which says the life that is open.
struct Objects {
    counts: Counts,
    accounts: Vec<(Arc<Account>, AtomicU64)>,
}

const DEAD: u64 = 1 << 63;

impl Objects {
    fn of_block(len: usize) -> Self {
        let accounts = (0..len).map(|_| (Arc::default(), AtomicU64::new(DEAD))).collect();
        Self { counts: Counts::OfBlock(Box::new(RefBlock::try_new().unwrap())), accounts }
    }

    fn with_refs(len: usize) -> Self {
        let accounts: Vec<_> =
            (0..len).map(|_| (Arc::<Account>::default(), AtomicU64::new(1))).collect();
        let count = |(account, _): &(Arc<Account>, _)| {
            account.begin(1);
            let released = Arc::clone(account);
            PercpuRef::new(move || released.end(1))
        };
        Self { counts: Counts::Refs(accounts.iter().map(count).collect()), accounts }
    }

    /// Takes a reference, and a clone of it if `twice`. Returns whether the object is in this life.
    fn try_get(&self, i: usize, life: u64, twice: bool) -> bool {
        match &self.counts {
            Counts::Refs(refs) => {
                let got = refs[i].try_get();
                got.iter().filter(|_| twice).for_each(|reference| reference.clone().leak());
                got.map(Reference::leak).is_some()
            }
            Counts::OfBlock(block) => {
                let _guard = rcu::pin();
                let gate = &self.accounts[i].1;
                let got = block.try_get(i, gate, life);
                if got && twice {
                    block.get_more(i, gate, life);
                }
                got
            }
        }
    }

    fn put(&self, (i, life): (usize, u64)) {
        let (account, gate) = &self.accounts[i];
        account.check(life);
        account.inside.fetch_sub(1, SeqCst);
        match &self.counts {
            // SAFETY: `try_get` leaked this reference.
            Counts::Refs(refs) => unsafe { PercpuRef::put(&refs[i]) },
            Counts::OfBlock(block) => {
                // SAFETY: the caller owns this reference, and the block outlives all threads.
                if unsafe { RefBlock::put(&**block, i, gate, life) } {
                    account.end(life);
                }
            }
        }
    }

    /// Ends the lives of objects with one barrier. Lives of a block begin again after a grace period.
    /// Returns how many this thread ended.
    fn kill(&self, batch: &[usize]) -> usize {
        let block = match &self.counts {
            Counts::Refs(refs) => {
                thread::yield_now(); // so that users have the objects meanwhile
                return batch.iter().filter(|&&i| refs[i].kill().is_ok()).count();
            }
            Counts::OfBlock(block) => block,
        };
        for &i in batch {
            self.accounts[i].1.store(DEAD, Relaxed);
        }
        fence::heavy_rseq();
        for &i in batch {
            if block.fold(i) {
                let account = &self.accounts[i].0;
                account.end(account.began.load(SeqCst));
            }
        }
        rcu::synchronize().unwrap();
        batch.len()
    }

    /// Gets, clones and puts references. Some are put by another thread than took them.
    fn use_one(&self, rng: &mut Rng, stash: &Mutex<Vec<(usize, u64)>>, gets: &AtomicU64) {
        let i = rng.usize(..self.accounts.len());
        let (account, gate) = &self.accounts[i];
        // Sometimes the number of an ended life, for which a get must fail.
        let is_stale = rng.usize(..16) == 0;
        let life = (gate.load(Relaxed) & !DEAD).saturating_sub(is_stale.into()).max(1);
        let twice = rng.usize(..4) == 0;
        if self.try_get(i, life, twice) {
            gets.fetch_add(1, Relaxed);
            account.inside.fetch_add(1 + i64::from(twice), SeqCst);
            account.check(life);
            if rng.usize(..8) == 0 {
                stash.lock().unwrap().push((i, life));
            } else {
                self.put((i, life));
            }
            if twice {
                self.put((i, life));
            }
        }
        if rng.usize(..8) == 0 {
            let taken = stash.lock().unwrap().pop();
            taken.into_iter().for_each(|reference| self.put(reference));
        }
    }

    /// Runs `own` in `owners` threads while `users` threads use the objects. Puts all references that
    /// are left. Returns the number of gets and the sum of what `own` returned.
    fn storm(
        &self,
        users: u64,
        owners: usize,
        own: impl Fn(usize) -> usize + Sync,
    ) -> (u64, usize) {
        let (stash, stop, gets) = (Mutex::default(), AtomicBool::new(false), AtomicU64::new(0));
        let use_some = |rng: &mut Rng, _| (0..64).for_each(|_| self.use_one(rng, &stash, &gets));
        let lives = hop(
            users,
            || !stop.load(Relaxed),
            use_some,
            || {
                let own = &own;
                let lives: thread::Result<Vec<_>> = thread::scope(|scope| {
                    let owners: Vec<_> = (0..owners).map(|n| scope.spawn(move || own(n))).collect();
                    owners.into_iter().map(|thread| thread.join()).collect()
                });
                stop.store(true, Relaxed); // also if an owner has panicked: `hop` waits for the users
                lives.unwrap().into_iter().sum()
            },
        );
        stash.into_inner().unwrap().into_iter().for_each(|reference| self.put(reference));
        (gets.into_inner(), lives)
    }
}

/// Owners begin and end lives of their counts of a block. Returns the numbers of gets and of lives.
fn lives_until(until: Instant, counts: usize, users: u64, owners: usize) -> (u64, usize) {
    let objects = Objects::of_block(counts);
    let own = |owner: usize| {
        let mut rng = rng::seeded(owner as u64 + 99);
        let mut life = 0;
        let Counts::OfBlock(block) = &objects.counts else { unreachable!() };
        while Instant::now() < until {
            let mut batch = Vec::new();
            for i in (owner..counts).step_by(owners) {
                let (account, gate) = &objects.accounts[i];
                if gate.load(Relaxed) != DEAD {
                    batch.extend((rng.usize(..4) != 0).then_some(i));
                } else if account.has_ended() {
                    life += 1;
                    account.begin(life);
                    block.open(i);
                    gate.store(life, Release);
                }
            }
            if rng.usize(..4) == 0 {
                thread::yield_now();
            }
            objects.kill(&batch);
        }
        life as usize
    };
    let done = objects.storm(users, owners, own);
    let lives = |&i: &usize| objects.accounts[i].1.load(Relaxed) != DEAD;
    objects.kill(&(0..counts).filter(lives).collect::<Vec<_>>());
    assert!(objects.accounts.iter().all(|(account, _)| account.has_ended()), "each ended once");
    done
}

/// Kills each of `len` new objects, and returns the numbers of gets and of objects.
fn kills(len: usize, users: u64, killers: usize) -> (u64, usize) {
    let objects = Objects::with_refs(len);
    let done = objects.storm(users, killers, |_| (0..len).map(|i| objects.kill(&[i])).sum());
    assert_eq!(done.1, len, "each object is killed once");
    let Counts::Refs(refs) = &objects.counts else { unreachable!() };
    for (refs, (account, _)) in refs.iter().zip(&objects.accounts) {
        assert!(refs.is_zero() && account.has_ended(), "{refs:?}");
    }
    done
}

/// Calls `round` with the end of the round for `time`, and for longer until it has returned more than
/// `least`, the numbers of gets and of lives.
fn storm(time: Duration, least: (u64, usize), mut round: impl FnMut(Instant) -> (u64, usize)) {
    const AGAIN: Duration = Duration::from_millis(500); // a further round, on a busy machine
    let _alone = alone();
    let until = Instant::now() + time;
    let (mut gets, mut lives) = (0, 0);
    let mut go = |more: (u64, usize)| {
        (gets, lives) = (gets + more.0, lives + more.1);
        keep_running(until, || gets > least.0 && lives > least.1)
    };
    while go(round(until.max(Instant::now() + AGAIN))) {}
    println!("{}: {gets} gets, {lives} lives", capabilities());
    assert!(gets > least.0 && lives > least.1);
}

/// For each storm of the stress tests.
const ENOUGH: (u64, usize) = (10_000, 100);

#[test]
#[ignore = "stress: two times five seconds of lives"]
fn stress_inv21_a_storm_of_lives_agrees_with_the_ledger() {
    for (counts, users, owners) in [(RefBlock::COUNTS, 6, 2), (1, 4, 1)] {
        storm(stress_time(5), ENOUGH, |until| lives_until(until, counts, users, owners));
    }
}

#[test]
#[ignore = "stress: two times five seconds of kills"]
fn stress_inv09_a_storm_of_kills_agrees_with_the_ledger() {
    for (objects, users, killers) in [(64, 6, 2), (1, 4, 4)] {
        storm(stress_time(5), ENOUGH, |_| kills(objects, users, killers));
    }
}

pub(crate) fn short_storms() {
    let time = Duration::from_millis(300);
    storm(time, (0, 8), |until| lives_until(until, 8, 4, 1));
    storm(time, (0, 8), |_| kills(8, 4, 2));
}

#[test]
fn inv21_short_storms_agree_with_the_ledger() {
    short_storms();
}
