//! `LgLock` in signal handlers, on the real kernel: which calls a handler is refused, that its
//! unlock wakes a waiting thread, and that no update of the handler or of the interrupted code is
//! lost.

use std::cell::Cell;
use std::hint;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use offlock_percpu::{CpuId, LgLock, LockError};

use testkit::signals::{SIGNAL, ThreadTimer, handle};
use testkit::stress::{keep_running, stress_time};

const ZERO: CpuId = CpuId::new(0);

/// The state that the threads of a test share with their signal handlers.
struct Stage {
    lock: LgLock<(u64, u64)>,
    /// The number of threads that wait for a slot.
    wanted: Vec<AtomicU64>,
    /// Set once a handler has held a slot.
    held: AtomicBool,
    /// The function that a handler calls.
    act: fn(&Stage, &Tally),
}

impl Stage {
    /// Leaked, because a handler may run until its thread ends.
    fn new(act: fn(&Stage, &Tally)) -> &'static Self {
        let lock = LgLock::new(|_| (0, 0));
        drop(lock.local().unwrap()); // used before
        let wanted = (0..lock.capacity()).map(|_| AtomicU64::new(0)).collect();
        handle(interrupted);
        Box::leak(Box::new(Self { lock, wanted, held: AtomicBool::new(false), act }))
    }

    /// Adds to a slot, waiting if another thread holds it.
    fn add_on(&self, cpu: CpuId) {
        self.wanted[cpu.index()].fetch_add(1, Relaxed);
        let mut guard = self.lock.local_on(cpu).unwrap();
        self.wanted[cpu.index()].fetch_sub(1, Relaxed);
        add(&mut guard);
    }

    fn total(&self) -> u64 {
        let all = self.lock.global().unwrap();
        assert!(all.iter().all(|(_, (first, second))| first == second));
        all.iter().map(|(_, (first, _))| *first).sum()
    }
}

/// Adds 1 by a separate load and store, so that a second thread or a handler inside loses an
/// update.
fn add((first, second): &mut (u64, u64)) {
    *first += 1;
    hint::black_box(&*first);
    *second += 1;
}

/// The results of the handler's calls on one thread.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Tally {
    signals: Cell<u64>,
    /// The number of adds by a handler.
    added: Cell<u64>,
    /// The number of unlocks of a slot for which a thread had waited long enough to sleep.
    waited_for: Cell<u64>,
    /// [`LockError::WouldBlock`].
    busy: Cell<u64>,
    /// [`LockError::Deadlock`].
    own: Cell<u64>,
    /// [`LockError::Forked`].
    /// Any other error, or another `errno` than before.
    wrong: Cell<u64>,
}

impl Tally {
    const fn new() -> Self {
        let [signals, added, waited_for, busy, own, wrong] = [const { Cell::new(0) }; 6];
        Self { signals, added, waited_for, busy, own, wrong }
    }

    fn refused(&self, error: LockError) {
        bump(match error {
            LockError::WouldBlock => &self.busy,
            LockError::Deadlock => &self.own,
            _ => &self.wrong,
        });
    }
}

fn bump(count: &Cell<u64>) {
    count.set(count.get() + 1);
}

thread_local! {
    // Nothing to drop, and `const` values: a signal handler may use them at any moment.
    static STAGE: Cell<Option<&'static Stage>> = const { Cell::new(None) };
    static TALLY: Tally = const { Tally::new() };
}

/// What the handler of this thread has counted so far.
fn tally() -> Tally {
    TALLY.with(Tally::clone)
}

extern "C" fn interrupted(_: libc::c_int) {
    let Some(stage) = STAGE.get() else { return };
    // SAFETY: returns the address of this thread's `errno`.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: `errno` belongs to this thread, and the interrupted code holds no reference to it.
    let before = unsafe { errno.replace(libc::EXDEV) };
    TALLY.with(|tally| {
        bump(&tally.signals);
        (stage.act)(stage, tally);
        // SAFETY: `errno` belongs to this thread, and the interrupted code holds no reference to
        // it.
        if unsafe { errno.replace(before) } != libc::EXDEV {
            bump(&tally.wrong);
        }
    });
}

/// Sends a signal to this thread.
fn interrupt() {
    // SAFETY: `raise` runs the handler on this thread before it returns.
    let rc = unsafe { libc::raise(SIGNAL) };
    assert_eq!(rc, 0);
}

fn spin(time: Duration) {
    let until = Instant::now() + time;
    while Instant::now() < until {
        hint::spin_loop();
    }
}

/// An action of the handler: adds to slot 0 unless it is held.
fn try_zero(stage: &Stage, tally: &Tally) {
    match stage.lock.try_local_on(ZERO) {
        Ok(mut guard) => {
            add(&mut guard);
            bump(&tally.added);
        }
        Err(error) => tally.refused(error),
    }
}

#[test]
fn inv22_a_handler_is_refused_what_is_held() {
    let stage = Stage::new(try_zero);
    STAGE.set(Some(stage));
    let guard = stage.lock.local_on(ZERO).unwrap();
    interrupt();
    assert_eq!(tally().own.get(), 1);
    drop(guard);
    let all = stage.lock.global().unwrap();
    interrupt();
    assert_eq!(tally().own.get(), 2);
    drop(all);
    interrupt();
    assert_eq!(tally().added.get(), 1, "the slot is free again");

    thread::scope(|scope| {
        let (held, is_held) = mpsc::channel();
        let (end, until) = mpsc::channel::<()>();
        scope.spawn(move || {
            let _guard = stage.lock.local_on(ZERO).unwrap();
            held.send(()).unwrap();
            let _ = until.recv(); // until `end` is dropped
        });
        is_held.recv().unwrap();
        interrupt();
        assert_eq!(tally().busy.get(), 1, "another thread holds the slot");
        drop(end);
    });
    interrupt();
    STAGE.set(None);
    let one = |n| Cell::new(n);
    let (signals, added, busy, own) = (one(5), one(2), one(1), one(2));
    assert_eq!(tally(), Tally { signals, added, busy, own, ..Tally::default() });
    assert_eq!(stage.total(), 2);
}

/// Holds slot 0 until the three threads of the test have waited for it long enough to sleep.
fn hold_zero(stage: &Stage, tally: &Tally) {
    match stage.lock.try_local_on(ZERO) {
        Ok(mut guard) => {
            stage.held.store(true, Relaxed);
            while stage.wanted[0].load(Relaxed) < 3 {
                hint::spin_loop();
            }
            spin(Duration::from_millis(50));
            add(&mut guard);
            bump(&tally.added);
        }
        Err(error) => tally.refused(error),
    }
}

#[test]
fn inv22_an_unlock_in_a_handler_wakes_who_waits() {
    let stage = Stage::new(hold_zero);
    thread::scope(|scope| {
        scope.spawn(|| {
            STAGE.set(Some(stage));
            interrupt();
            let (signals, added) = (Cell::new(1), Cell::new(1));
            assert_eq!(tally(), Tally { signals, added, ..Tally::default() });
        });
        // Not by `try_`, because the handler would then find the slot held and give up.
        while !stage.held.load(Relaxed) {
            thread::yield_now();
        }
        for _ in 0..3 {
            scope.spawn(|| stage.add_on(ZERO));
        }
    });
    assert_eq!(stage.total(), 4);
}

/// The time after which a thread that waits for a slot sleeps. A guess: it spins for a microsecond
/// and yields four times.
const UNTIL_ASLEEP: Duration = Duration::from_micros(30);

/// Adds to this CPU's slot, and holds it for a while so that other threads wait.
fn storm_act(stage: &Stage, tally: &Tally) {
    match stage.lock.try_local() {
        Ok(mut guard) => {
            let wanted = || stage.wanted[guard.cpu().index()].load(Relaxed) != 0;
            let before = wanted();
            spin(UNTIL_ASLEEP);
            if before && wanted() {
                bump(&tally.waited_for);
            }
            add(&mut guard);
            bump(&tally.added);
        }
        Err(error) => tally.refused(error),
    }
}

/// Four threads lock by every method, and each is interrupted every 100 us. Returns the sums of
/// what their handlers counted.
fn storm(time: Duration) -> Tally {
    let stage = Stage::new(storm_act);
    let (until, slots) = (Instant::now() + time, stage.lock.capacity());
    let work = |id: u64| {
        STAGE.set(Some(stage));
        let timer = ThreadTimer::start(Duration::from_micros(100));
        let (mut turn, mut added) = (id, 0);
        while keep_running(until, || added > 0 && tally().added.get() > 0) {
            turn += 1;
            added += match turn % 16 {
                0 => {
                    stage.lock.global().unwrap().iter_mut().for_each(|(_, value)| add(value));
                    slots as u64
                }
                1 => match stage.lock.try_local() {
                    Ok(mut guard) => {
                        add(&mut guard);
                        1
                    }
                    Err(error) => {
                        assert_eq!(error, LockError::WouldBlock);
                        0
                    }
                },
                2..10 => {
                    stage.add_on(CpuId::new((turn / 16 % slots as u64) as u32));
                    1
                }
                _ => {
                    let mut guard = stage.lock.local().unwrap();
                    // So that a signal arrives while the slot is held.
                    (0..100).for_each(|_| hint::spin_loop());
                    add(&mut guard);
                    1
                }
            };
        }
        STAGE.set(None);
        drop(timer);
        (added, tally())
    };
    let work = &work;
    let done: Vec<(u64, Tally)> = thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|id| scope.spawn(move || work(id))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let sum = |count: fn(&Tally) -> &Cell<u64>| {
        Cell::new(done.iter().map(|(_, tally)| count(tally).get()).sum())
    };
    let all = Tally {
        signals: sum(|tally| &tally.signals),
        added: sum(|tally| &tally.added),
        waited_for: sum(|tally| &tally.waited_for),
        busy: sum(|tally| &tally.busy),
        own: sum(|tally| &tally.own),
        wrong: sum(|tally| &tally.wrong),
    };
    let threads: u64 = done.iter().map(|(added, _)| added).sum();
    println!("{threads} additions by threads; by their handlers {all:?}");
    assert_eq!(stage.total(), threads + all.added.get());
    assert_eq!(all.wrong.get(), 0);
    assert!(threads > 0 && all.added.get() > 0);
    all
}

#[test]
fn inv22_threads_and_their_handlers_lose_no_update() {
    storm(Duration::from_millis(300));
}

#[test]
#[ignore = "stress: five seconds of signals"]
fn stress_inv22_threads_and_their_handlers_lose_no_update() {
    let until = Instant::now() + stress_time(5);
    let all = storm(stress_time(5));
    while keep_running(until, || [&all.own, &all.busy, &all.waited_for].iter().all(|n| n.get() > 0))
    {
        let more = storm(Duration::from_secs(1));
        for (sum, n) in
            [(&all.own, more.own), (&all.busy, more.busy), (&all.waited_for, more.waited_for)]
        {
            sum.set(sum.get() + n.get());
        }
    }
    assert!(all.own.get() > 0, "no handler interrupted a holder: the test proves too little");
    assert!(all.busy.get() > 0, "no handler met another thread: the test proves too little");
    assert!(all.waited_for.get() > 0, "no handler woke a thread: the test proves too little");
}
