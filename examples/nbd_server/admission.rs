//! Queues of operations above the engine's depth: by export in turn, and by priority within an
//! export.
//!
//! ```text
//!  start ─┬─► engine                below its depth: no queue is touched
//!         └─► export 0 ─► syncs │ small reads │ small writes │ large reads │ large writes ─┐
//!             export 1 ─► ...                                                              │
//!                                    a slot is free ◄── the next of the export in turn ───┘
//! ```
//!
//! A worker's engine belongs to its thread, and so do the queues: one per worker and export,
//! without a lock. A queue that workers share could not fill a free slot of one engine with a
//! request of another worker's connection. Exports take turns, so that writes to one do not delay
//! reads of another.
//!
//! NBD lets requests in flight be carried out in any order. A FLUSH covers the writes that were
//! answered before it was sent, and those have left the queues already.

use std::collections::VecDeque;
use std::fmt;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use mq_rbtree::Core;
use percpu::AllocError;

/// Longest transfer that is a small one: beyond it the device's time for the bytes counts for more
/// than its time for the request. A guess.
pub(crate) const SMALL: u64 = 64 << 10;
/// One of so many operations of an export is taken from each class in turn, whatever its priority.
/// A guess: if all classes wait, each gets 2.5 % at least.
pub(crate) const AGEING: NonZeroU32 = NonZeroU32::new(8).unwrap();
/// The number of values of [`Class`].
pub(crate) const CLASSES: usize = 5;

/// The priority of a queued operation, the least urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Class {
    LargeWrite,
    LargeRead,
    SmallWrite,
    SmallRead,
    /// A FLUSH: its client waits for writes to be durable.
    Sync,
}

impl Class {
    pub(crate) const ALL: [Self; CLASSES] =
        [Self::LargeWrite, Self::LargeRead, Self::SmallWrite, Self::SmallRead, Self::Sync];

    pub(crate) fn of_read(len: u64) -> Self {
        if len <= SMALL { Self::SmallRead } else { Self::LargeRead }
    }

    pub(crate) fn of_write(len: u64) -> Self {
        if len <= SMALL { Self::SmallWrite } else { Self::LargeWrite }
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::LargeWrite => "large writes",
            Self::LargeRead => "large reads",
            Self::SmallWrite => "small writes",
            Self::SmallRead => "small reads",
            Self::Sync => "syncs",
        })
    }
}

/// The queues of one engine. They allocate only if more operations wait than ever before.
#[derive(Debug)]
pub(crate) struct Admission<T> {
    /// By index of the export table.
    queues: Box<[Core<Waiting<T>>]>,
    /// The exports whose queues are not empty, the next one first.
    turns: VecDeque<usize>,
    stats: WaitStats,
}

struct Waiting<T> {
    value: T,
    since: Instant,
}

impl<T> Admission<T> {
    pub(crate) fn new(exports: usize) -> Result<Self, AllocError> {
        let queue = |_| {
            let mut queue = Core::try_new(0)?;
            queue.set_ageing(Some(AGEING));
            Ok(queue)
        };
        Ok(Self {
            queues: (0..exports).map(queue).collect::<Result<_, AllocError>>()?,
            turns: VecDeque::with_capacity(exports),
            stats: WaitStats::default(),
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.stats.depth
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.stats.depth == 0
    }

    pub(crate) fn stats(&self) -> WaitStats {
        self.stats
    }

    /// Queues `value`. Returns it if there is no memory.
    pub(crate) fn push(&mut self, export: usize, class: Class, value: T) -> Result<(), T> {
        let queue = &mut self.queues[export];
        let was_empty = queue.is_empty();
        let waiting = Waiting { value, since: Instant::now() };
        queue.push(class as u32, waiting).map_err(|waiting| waiting.value)?;
        if was_empty {
            self.turns.push_back(export);
        }
        self.stats.depth += 1;
        self.stats.peak = self.stats.peak.max(self.stats.depth);
        Ok(())
    }

    /// The length of the queue of an export.
    pub(crate) fn len_of(&self, export: usize) -> usize {
        self.queues[export].len()
    }

    /// Takes the next operation of the first export in turn that `may` go on, and returns both.
    pub(crate) fn pop_if(&mut self, mut may: impl FnMut(usize) -> bool) -> Option<(usize, T)> {
        let at = self.turns.iter().position(|&export| may(export))?;
        let export = self.turns.remove(at)?;
        let queue = &mut self.queues[export];
        let (Waiting { value, since }, class) = queue.pop()?;
        if !queue.is_empty() {
            self.turns.push_back(export);
        }
        self.stats.depth -= 1;
        self.stats.classes[class as usize].count(since.elapsed());
        Some((export, value))
    }

    /// Removes the operations for which `take` is true, and passes them to `out`.
    pub(crate) fn drop_if(&mut self, mut take: impl FnMut(&T) -> bool, mut out: impl FnMut(T)) {
        let Self { queues, turns, stats } = self;
        turns.retain(|&export| {
            let queue = &mut queues[export];
            let before = queue.len();
            queue.drain_filter(|waiting, _| take(&waiting.value), |waiting, _| out(waiting.value));
            stats.depth -= before - queue.len();
            stats.dropped += (before - queue.len()) as u64;
            !queue.is_empty()
        });
    }
}

/// The operations that wait and have waited.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WaitStats {
    /// Operations that wait now.
    pub(crate) depth: usize,
    /// Most operations that ever waited.
    pub(crate) peak: usize,
    /// Operations whose connections were closed meanwhile.
    pub(crate) dropped: u64,
    /// Waits that are over, by [`Class`].
    classes: [Waits; CLASSES],
}

/// The number and the times of waits that are over.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Waits {
    pub(crate) count: u64,
    pub(crate) time: Duration,
    pub(crate) longest: Duration,
}

impl Waits {
    fn count(&mut self, time: Duration) {
        self.count += 1;
        self.time += time;
        self.longest = self.longest.max(time);
    }
}

impl WaitStats {
    pub(crate) fn of(&self, class: Class) -> Waits {
        self.classes[class as usize]
    }

    /// Adds the figures of another engine. The peak is the larger one.
    pub(crate) fn add(&mut self, other: &Self) {
        self.depth += other.depth;
        self.peak = self.peak.max(other.peak);
        self.dropped += other.dropped;
        for (mine, its) in self.classes.iter_mut().zip(&other.classes) {
            mine.count += its.count;
            mine.time += its.time;
            mine.longest = mine.longest.max(its.longest);
        }
    }
}

impl fmt::Display for WaitStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { depth, peak, dropped, .. } = self;
        write!(
            f,
            "waiting    {depth} for a place in an engine, at most {peak} for one; {dropped} dropped \
             with their connections"
        )?;
        for class in Class::ALL.into_iter().rev() {
            let Waits { count, time, longest } = self.of(class);
            if count > 0 {
                let mean = time.div_f64(count as f64);
                write!(
                    f,
                    "\n  {class:<12}  {count:>10} waited  {mean:>10.1?} on average  {longest:>10.1?} \
                     at most"
                )?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl<T> Admission<T> {
        fn pop(&mut self) -> Option<T> {
            self.pop_if(|_| true).map(|(_, value)| value)
        }
    }

    fn take<T>(waiting: &mut Admission<T>) -> T {
        waiting.pop().expect("something waits")
    }

    #[test]
    fn a_transfer_is_small_up_to_the_limit() {
        assert_eq!(Class::of_read(0), Class::SmallRead);
        assert_eq!(Class::of_read(SMALL), Class::SmallRead);
        assert_eq!(Class::of_read(SMALL + 1), Class::LargeRead);
        assert_eq!(Class::of_write(SMALL), Class::SmallWrite);
        assert_eq!(Class::of_write(SMALL + 1), Class::LargeWrite);
        assert!(
            Class::ALL.is_sorted() && Class::ALL.map(|class| class as usize) == [0, 1, 2, 3, 4]
        );
    }

    #[test]
    fn no_class_starves_and_the_share_of_each_is_bounded() {
        let mut waiting = Admission::new(1).unwrap();
        let rounds = 1_000 * AGEING.get() as usize;
        let mut served = [0; CLASSES];
        let mut last = [0; CLASSES];
        for class in Class::ALL {
            waiting.push(0, class, class).unwrap();
        }
        for round in 1..=rounds {
            let class = take(&mut waiting);
            let gap = round - std::mem::replace(&mut last[class as usize], round);
            assert!(gap <= CLASSES * AGEING.get() as usize, "{class} had to wait {gap} rounds");
            served[class as usize] += 1;
            waiting.push(0, class, class).unwrap();
        }
        let each = rounds / AGEING.get() as usize / CLASSES;
        assert_eq!(served[..4], [each; 4], "what is not urgent gets its share and no more");
    }

    #[test]
    fn exports_take_turns() {
        let mut waiting = Admission::new(3).unwrap();
        for nr in 0..3 {
            waiting.push(0, Class::Sync, (0, nr)).unwrap();
        }
        waiting.push(2, Class::LargeWrite, (2, 0)).unwrap();
        waiting.push(2, Class::LargeWrite, (2, 1)).unwrap();
        let order: Vec<_> = std::iter::from_fn(|| waiting.pop()).collect();
        assert_eq!(order, [(0, 0), (2, 0), (0, 1), (2, 1), (0, 2)]);
        // An export whose turn it was has no right to another because it emptied meanwhile.
        waiting.push(1, Class::Sync, (1, 0)).unwrap();
        waiting.push(0, Class::Sync, (0, 3)).unwrap();
        assert_eq!((take(&mut waiting), take(&mut waiting)), ((1, 0), (0, 3)));
        assert!(waiting.is_empty() && waiting.pop().is_none());
    }

    #[test]
    fn an_export_that_may_not_go_on_keeps_its_turn() {
        let mut waiting = Admission::new(3).unwrap();
        for nr in 0..6 {
            waiting.push(nr % 3, Class::SmallRead, nr).unwrap();
        }
        let others = |export| export != 0;
        assert_eq!(waiting.len_of(0), 2);
        let order: Vec<_> = std::iter::from_fn(|| waiting.pop_if(others)).collect();
        assert_eq!(order, [(1, 1), (2, 2), (1, 4), (2, 5)]);
        assert_eq!(waiting.len(), 2);
        waiting.push(1, Class::SmallRead, 6).unwrap();
        assert_eq!([take(&mut waiting), take(&mut waiting), take(&mut waiting)], [0, 6, 3]);
    }

    #[test]
    fn the_others_keep_their_turns_if_operations_are_dropped() {
        let mut waiting = Admission::new(2).unwrap();
        for nr in 0..10 {
            waiting.push(nr % 2, Class::SmallRead, nr).unwrap();
        }
        let mut dropped = Vec::new();
        waiting.drop_if(|nr| nr % 2 == 0 || *nr == 5, |nr| dropped.push(nr));
        assert_eq!((dropped, waiting.len()), (vec![0, 2, 4, 6, 8, 5], 4));
        assert_eq!(waiting.stats().dropped, 6);
        waiting.push(0, Class::LargeWrite, 10).unwrap(); // it has a turn again, and one only
        let order: Vec<_> = std::iter::from_fn(|| waiting.pop()).collect();
        assert_eq!(order, [1, 10, 3, 7, 9]);
        assert_eq!((waiting.len(), waiting.stats().peak), (0, 10));
    }

    #[test]
    fn no_memory_is_asked_for_once_as_many_have_waited() {
        let mut waiting = Admission::new(1).unwrap();
        let fill = |waiting: &mut Admission<usize>| {
            (0..100).for_each(|nr| waiting.push(0, Class::ALL[nr % CLASSES], nr).unwrap());
        };
        fill(&mut waiting);
        let capacity = (waiting.queues[0].capacity(), waiting.turns.capacity());
        for _ in 0..100 {
            while waiting.pop().is_some() {}
            fill(&mut waiting);
        }
        assert_eq!((waiting.queues[0].capacity(), waiting.turns.capacity()), capacity);
    }

    #[test]
    fn the_page_names_the_classes_that_waited() {
        let mut waiting = Admission::new(1).unwrap();
        assert_eq!(waiting.stats().to_string().lines().count(), 1);
        waiting.push(0, Class::LargeRead, ()).unwrap();
        waiting.push(0, Class::Sync, ()).unwrap();
        waiting.push(0, Class::SmallRead, ()).unwrap();
        take(&mut waiting);
        take(&mut waiting);
        let mut sum = waiting.stats();
        sum.add(&waiting.stats());
        let text = sum.to_string();
        let lines: Vec<_> = text.lines().collect();
        assert!(lines[0].starts_with("waiting    2 for a place in an engine, at most 3 for one;"));
        let words = |line: &str| line.split_whitespace().take(3).collect::<Vec<_>>().join(" ");
        assert_eq!(words(lines[1]), "syncs 2 waited");
        assert_eq!(words(lines[2]), "small reads 2");
        assert_eq!(lines.len(), 3, "{text}");
    }
}
