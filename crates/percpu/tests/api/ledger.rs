//! A ledger of references: threads get, clone and put references of counted objects while other threads kill
//! them, and each count is compared with its account.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::*};
use std::thread;
use std::time::{Duration, Instant};

use offlock_percpu::capabilities;

use crate::no_id::take_id;
use testkit::pin::{allowed_cpus, pin_to};
use testkit::rng;
use testkit::stress::{keep_running, stress_time};

/// What is known of one object.
#[derive(Default)]
pub(crate) struct Account {
    /// The number of references that threads hold.
    inside: AtomicI64,
    /// The last life that began, and the last that ended.
    began: AtomicU64,
    ended: AtomicU64,
}

impl Account {
    pub(crate) fn begin(&self, life: u64) {
        assert_eq!(self.ended.load(SeqCst), self.began.swap(life, SeqCst), "one life at a time");
    }

    pub(crate) fn began(&self) -> u64 {
        self.began.load(SeqCst)
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.began.load(SeqCst) == self.ended.load(SeqCst)
    }

    /// Notes that the caller has taken a reference.
    fn enter(&self, life: u64) {
        self.inside.fetch_add(1, SeqCst);
        self.check(life);
    }

    /// Notes that the caller is about to put a reference.
    fn leave(&self, life: u64) {
        self.check(life);
        self.inside.fetch_sub(1, SeqCst);
    }

    fn check(&self, life: u64) {
        let (began, ended) = (self.began.load(SeqCst), self.ended.load(SeqCst));
        assert_eq!((began, ended < life), (life, true), "a reference of an ended life");
    }

    pub(crate) fn end(&self, life: u64) {
        assert_eq!(self.inside.load(SeqCst), 0, "ended while a thread has a reference");
        assert_eq!(self.began.load(SeqCst), life);
        assert_ne!(self.ended.swap(life, SeqCst), life, "ended twice");
    }
}

/// Objects with accounts.
pub(crate) trait Objects: Sync {
    fn len(&self) -> usize;
    fn account(&self, i: usize) -> &Account;
    /// Returns the life of an object, if it lives.
    fn life(&self, i: usize) -> Option<u64>;
    /// Takes a reference, and a clone of it if `twice`. Returns whether the object lives in `life`.
    fn try_get(&self, i: usize, life: u64, twice: bool) -> bool;
    /// Puts a reference of the caller.
    fn put(&self, i: usize, life: u64);
}

fn put(objects: &impl Objects, (i, life): (usize, u64)) {
    objects.account(i).leave(life);
    objects.put(i, life);
}

/// Gets, clones and puts references. Some threads have no CPU id, and some references are put by
/// another thread than took them.
fn use_objects(
    objects: &impl Objects,
    stash: &Mutex<Vec<(usize, u64)>>,
    stop: &AtomicBool,
    seed: u64,
) -> u64 {
    if seed % 4 == 3 {
        take_id();
    }
    let (cpus, mut rng, mut gets, mut stale) = (allowed_cpus(), rng::seeded(seed), 0, 1);
    while !stop.load(Relaxed) {
        let i = rng.usize(..objects.len());
        // Sometimes the number of an ended life, for which a get must fail.
        let life = if rng.usize(..16) == 0 { Some(stale) } else { objects.life(i) };
        let twice = rng.usize(..4) == 0;
        if let Some(life) = life.filter(|&life| objects.try_get(i, life, twice)) {
            (gets, stale) = (gets + 1, life);
            (0..=u8::from(twice)).for_each(|_| objects.account(i).enter(life));
            if rng.usize(..64) == 0 {
                pin_to(&[cpus[rng.usize(..cpus.len())]]);
            }
            if rng.usize(..8) == 0 {
                stash.lock().unwrap().push((i, life));
            } else {
                put(objects, (i, life));
            }
            if twice {
                put(objects, (i, life));
            }
        }
        if rng.usize(..8) == 0 {
            let taken = stash.lock().unwrap().pop();
            taken.into_iter().for_each(|reference| put(objects, reference));
        }
    }
    gets
}

/// Runs `f` while threads use the objects. Puts all references that are left. Returns the number of gets.
pub(crate) fn beside_users<R>(
    objects: &impl Objects,
    users: u64,
    f: impl FnOnce() -> R,
) -> (u64, R) {
    let (stash, stop) = (Mutex::default(), AtomicBool::new(false));
    let done = thread::scope(|scope| {
        let (stash, stop) = (&stash, &stop);
        let users: Vec<_> = (0..users)
            .map(|seed| scope.spawn(move || use_objects(objects, stash, stop, seed)))
            .collect();
        let result = f();
        stop.store(true, SeqCst);
        (users.into_iter().map(|thread| thread.join().unwrap()).sum(), result)
    });
    stash.into_inner().unwrap().into_iter().for_each(|reference| put(objects, reference));
    done
}

/// The time of each further round, if the first one did too little.
const AGAIN: Duration = Duration::from_millis(500);

/// Calls `round` for `OFFLOCK_STRESS_SECONDS` (default 5) with the end of the round. It returns the numbers of gets
/// and of lives.
pub(crate) fn storm(mut round: impl FnMut(Instant) -> (u64, u64)) {
    let until = Instant::now() + stress_time(5);
    let (mut gets, mut lives) = (0, 0);
    while keep_running(until, || gets > 10_000 && lives > 100) {
        let more = round(until.max(Instant::now() + AGAIN));
        (gets, lives) = (gets + more.0, lives + more.1);
    }
    println!("{}: {gets} gets, {lives} lives", capabilities());
    assert!(gets > 10_000 && lives > 100);
}
