//! Admission of operations: how many run, and which queued operation runs next.
//!
//! ```text
//!  start ───► image ─► syncs │ small reads │ small writes │ large reads │ large writes ─┐
//!             image ─► ...                                                              │
//!                      below the limit: run ◄── the next operation of the image in turn ◄─┘
//! ```
//!
//! A worker's engine belongs to its thread, and so do the queues: one per worker and image, without
//! a lock. A queue shared by workers could not fill a free slot of one engine with a request of
//! another worker's connection. Images take turns, so that writes of one do not delay reads of
//! another.
//!
//! An image whose device hangs keeps the places of its operations. So an image may only have a
//! fixed multiple of the places that it leaves to others, its share. The first image that hangs
//! leaves a ninth of the places, and the next one leaves a ninth of that.
//!
//! NBD allows requests in flight to be carried out in any order. A FLUSH covers the writes that
//! were answered before it was sent, and those have left the queues already.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::rc::Rc;

use mq_rbtree::Core;

/// Longest transfer that counts as small: for longer ones the device's time per byte outweighs its
/// time per request.
pub(crate) const SMALL: u64 = 64 << 10;
/// One in this many operations of an image is taken from each class in turn, whatever its priority.
/// If all classes wait, each gets at least 2.5 %.
pub(crate) const AGEING: NonZeroU32 = NonZeroU32::new(8).unwrap();

/// The priority of a queued operation, from the least urgent to the most urgent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Class {
    LargeWrite,
    LargeRead,
    SmallWrite,
    SmallRead,
    /// A FLUSH, whose client waits for writes to become durable.
    Sync,
}

impl Class {
    pub(crate) fn of_read(len: u64) -> Self {
        if len <= SMALL { Self::SmallRead } else { Self::LargeRead }
    }

    pub(crate) fn of_write(len: u64) -> Self {
        if len <= SMALL { Self::SmallWrite } else { Self::LargeWrite }
    }
}

/// Most places of an image, as a multiple of the places that it leaves to others. An image
/// alone may use all places of a limit up to 8, and 114 of 128.
const SHARE: usize = 8;

/// The running and queued operations of one kind. Allocates only if more operations wait than ever
/// before.
#[derive(Debug)]
pub(crate) struct Admission<T> {
    /// Most running operations.
    limit: usize,
    running: usize,
    /// The queues that are not empty, in the order of their turns.
    turns: VecDeque<Rc<Queue<T>>>,
    /// Queued operations.
    waiting: usize,
}

/// The running and queued operations of one image.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    running: Cell<usize>,
    core: RefCell<Core<T>>,
}

impl<T> Queue<T> {
    pub(crate) fn new() -> Rc<Self> {
        let mut core = Core::new(0);
        core.set_ageing(Some(AGEING));
        Rc::new(Self { running: Cell::new(0), core: RefCell::new(core) })
    }

    /// Returns the number of running operations of the image.
    pub(crate) fn running(&self) -> usize {
        self.running.get()
    }

    /// Returns the number of queued operations of the image.
    pub(crate) fn waiting(&self) -> usize {
        self.core.borrow().len()
    }
}

/// Returns whether an image that has `used` places may have one more while `left` places are free.
fn is_within_share(used: usize, left: usize) -> bool {
    left > 0 && used < SHARE * left
}

/// Returns whether one more request of an image may run or queue. `used` of `most` requests already
/// do, of which `its()` belong to the image.
pub(crate) fn may_queue(most: usize, used: usize, its: impl FnOnce() -> usize) -> bool {
    let left = most.saturating_sub(used);
    // Even if all used places are the image's, its share is not exceeded.
    left > used || is_within_share(its(), left)
}

impl<T> Admission<T> {
    /// At most `limit` operations run.
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, running: 0, turns: VecDeque::new(), waiting: 0 }
    }

    /// Returns the number of running operations.
    pub(crate) fn running(&self) -> usize {
        self.running
    }

    /// Returns the number of queued operations.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting
    }

    fn allows(&self, queue: &Queue<T>) -> bool {
        is_within_share(queue.running(), self.limit.saturating_sub(self.running))
    }

    /// Releases the place of an operation that has ended.
    pub(crate) fn end(&mut self, queue: &Queue<T>) {
        queue.running.set(queue.running() - 1);
        self.running -= 1;
    }

    /// Queues `value`. Returns it if there is no memory.
    pub(crate) fn push(&mut self, queue: &Rc<Queue<T>>, class: Class, value: T) -> Result<(), T> {
        if self.turns.try_reserve(1).is_err() {
            return Err(value);
        }
        let mut core = queue.core.borrow_mut();
        let was_empty = core.is_empty();
        core.push(class as u32, value)?;
        if was_empty {
            self.turns.push_back(Rc::clone(queue));
        }
        self.waiting += 1;
        Ok(())
    }

    /// Admits the next operation of the first image in turn that may have one more. The caller must
    /// [`end`](Self::end) it.
    pub(crate) fn next(&mut self) -> Option<T> {
        if self.running >= self.limit {
            return None;
        }
        let at = self.turns.iter().position(|queue| self.allows(queue))?;
        let queue = self.turns.remove(at)?;
        let (value, _) = queue.core.borrow_mut().pop()?;
        queue.running.set(queue.running() + 1);
        self.running += 1;
        if queue.waiting() > 0 {
            self.turns.push_back(queue);
        }
        self.waiting -= 1;
        Some(value)
    }

    /// Removes the queued operations for which `take` returns true, and passes them to `out`.
    pub(crate) fn drop_if(&mut self, mut take: impl FnMut(&T) -> bool, mut out: impl FnMut(T)) {
        let Self { turns, waiting, .. } = self;
        turns.retain(|queue| {
            let mut queue = queue.core.borrow_mut();
            let before = queue.len();
            queue.drain_filter(|value, _| take(value), |value, _| out(value));
            *waiting -= before - queue.len();
            !queue.is_empty()
        });
    }
}

impl<T> Drop for Admission<T> {
    /// Queued operations may refer to their queues. Without this, those of a worker that failed
    /// would leak.
    fn drop(&mut self) {
        self.drop_if(|_| true, drop);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLASSES: usize = 5;

    impl Class {
        const ALL: [Self; CLASSES] =
            [Self::LargeWrite, Self::LargeRead, Self::SmallWrite, Self::SmallRead, Self::Sync];
    }

    /// An admission with the queues of some images.
    struct Images<T> {
        admission: Admission<T>,
        queues: Vec<Rc<Queue<T>>>,
    }

    impl<T> Images<T> {
        fn new(limit: usize, images: usize) -> Self {
            let queues = (0..images).map(|_| Queue::new()).collect();
            Self { admission: Admission::new(limit), queues }
        }

        /// Makes an admission in which one operation may run, of any image.
        fn full(images: usize) -> Self {
            let mut new = Self::new(usize::MAX, images);
            new.admission.running = usize::MAX - 1;
            new
        }

        fn push(&mut self, image: usize, class: Class, value: T) {
            let pushed = self.admission.push(&self.queues[image], class, value);
            assert!(pushed.is_ok());
        }

        fn end(&mut self, image: usize) {
            self.admission.end(&self.queues[image]);
        }

        /// Admits and ends the next operation.
        fn pop(&mut self) -> Option<T> {
            let before: Vec<_> = self.queues.iter().map(|queue| queue.running()).collect();
            let value = self.admission.next()?;
            let image = (0..before.len()).find(|&at| self.queues[at].running() > before[at]);
            self.end(image.expect("it runs"));
            Some(value)
        }

        fn take(&mut self) -> T {
            self.pop().expect("something waits")
        }

        fn rest(&mut self) -> Vec<T> {
            std::iter::from_fn(|| self.pop()).collect()
        }
    }

    impl<T: Default> Images<T> {
        /// Begins as many operations as may run. Returns their number.
        fn begin_all(&mut self, image: usize) -> usize {
            let begin = |images: &mut Self| {
                images.push(image, Class::SmallRead, T::default());
                images.admission.next().is_some()
            };
            let begun = (0..).find(|_| !begin(self)).expect("a limit");
            self.admission.drop_if(|_| true, drop); // the last one
            begun
        }
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
    fn an_image_has_no_more_than_its_share_and_leaves_some_to_others() {
        let mut images = Images::<()>::new(128, 3);
        assert_eq!([0, 1, 2, 0].map(|image| images.begin_all(image)), [114, 13, 1, 0]);
        (0..114).for_each(|_| images.end(0));
        assert_eq!([2, 1, 0].map(|image| images.begin_all(image) > 0), [true; 3]);
        for limit in 1..=SHARE {
            let mut images = Images::<()>::new(limit, 1);
            assert_eq!(images.begin_all(0), limit, "of few places, all");
        }
    }

    #[test]
    fn no_class_starves_and_the_share_of_each_is_bounded() {
        let mut waiting = Images::full(1);
        let rounds = 1_000 * AGEING.get() as usize;
        let mut served = [0; CLASSES];
        let mut last = [0; CLASSES];
        for class in Class::ALL {
            waiting.push(0, class, class);
        }
        for round in 1..=rounds {
            let class = waiting.take();
            let gap = round - std::mem::replace(&mut last[class as usize], round);
            assert!(gap <= CLASSES * AGEING.get() as usize, "{class:?} had to wait {gap} rounds");
            served[class as usize] += 1;
            waiting.push(0, class, class);
        }
        let each = rounds / AGEING.get() as usize / CLASSES;
        assert_eq!(served[..4], [each; 4], "what is not urgent gets its share and no more");
    }

    #[test]
    fn images_take_turns() {
        let mut waiting = Images::full(3);
        for nr in 0..3 {
            waiting.push(0, Class::Sync, (0, nr));
        }
        waiting.push(2, Class::LargeWrite, (2, 0));
        waiting.push(2, Class::LargeWrite, (2, 1));
        assert_eq!(waiting.rest(), [(0, 0), (2, 0), (0, 1), (2, 1), (0, 2)]);
        // An image that emptied its queue during its turn gets no extra turn.
        waiting.push(1, Class::Sync, (1, 0));
        waiting.push(0, Class::Sync, (0, 3));
        assert_eq!((waiting.take(), waiting.take()), ((1, 0), (0, 3)));
        assert!(waiting.admission.waiting == 0 && waiting.admission.next().is_none());
    }

    #[test]
    fn an_image_that_may_not_go_on_keeps_its_turn() {
        let mut waiting = Images::new(10, 3);
        assert_eq!(waiting.begin_all(0), 9);
        for nr in 0..6 {
            waiting.push(nr % 3, Class::SmallRead, nr);
        }
        assert_eq!((waiting.queues[0].running(), waiting.queues[0].waiting()), (9, 2));
        assert_eq!(waiting.rest(), [1, 2, 4, 5]);
        waiting.push(1, Class::SmallRead, 6);
        (0..9).for_each(|_| waiting.end(0));
        assert_eq!([waiting.take(), waiting.take(), waiting.take()], [0, 6, 3]);
    }

    #[test]
    fn the_others_keep_their_turns_if_operations_are_dropped() {
        let mut waiting = Images::full(2);
        for nr in 0..10 {
            waiting.push(nr % 2, Class::SmallRead, nr);
        }
        let mut dropped = Vec::new();
        waiting.admission.drop_if(|nr| nr % 2 == 0 || *nr == 5, |nr| dropped.push(nr));
        assert_eq!((dropped, waiting.admission.waiting), (vec![0, 2, 4, 6, 8, 5], 4));
        waiting.push(0, Class::LargeWrite, 10); // it has one turn again
        assert_eq!(waiting.rest(), [1, 10, 3, 7, 9]);
        assert_eq!(waiting.admission.waiting, 0);
    }

    #[test]
    fn no_memory_is_asked_for_once_as_many_have_waited() {
        let mut waiting = Images::full(1);
        let fill = |waiting: &mut Images<usize>| {
            let class = |nr| Class::ALL[nr % CLASSES];
            (0..100).for_each(|nr| waiting.push(0, class(nr), nr));
        };
        fill(&mut waiting);
        let capacity = |waiting: &Images<usize>| {
            (waiting.queues[0].core.borrow().capacity(), waiting.admission.turns.capacity())
        };
        let before = capacity(&waiting);
        for _ in 0..100 {
            while waiting.pop().is_some() {}
            fill(&mut waiting);
        }
        assert_eq!(capacity(&waiting), before);
    }

    #[test]
    fn room_in_the_queue_is_left_to_others() {
        let limit = (4..64).find(|&used| !may_queue(64, used, || used)).expect("a limit");
        assert!((36..64).contains(&limit), "{limit}");
        assert!(may_queue(64, limit, || 0) && !may_queue(64, 64, || 0));
    }
}
