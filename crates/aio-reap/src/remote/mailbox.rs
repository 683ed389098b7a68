//! What other threads and the engine share: letters to the engine, and results back.
//!
//! ```text
//!  sender:   free ─► write the letter ─► sent (a stack; ring if it was empty) ─► wait ─► collect ─► free
//!  engine:                     answer the bell ─► take all, oldest first ─► finish ─┘
//! ```
//!
//! # Invariants
//!
//! 1. A place is in exactly one of: `free`; a sender's hands; `sent`; the engine's hands, from `take`
//!    to `finish`; its waiting sender's hands, from `finish` to the collection.
//! 2. If `sent` is not empty, the bell was rung since the engine last took: the sender that makes it
//!    non-empty rings, after its letter is there. The engine answers the bell before it takes.
//! 3. Who waits is told after the result is stored: it was registered, or looks, under the lock of its
//!    place, which the result is stored under.
//! 4. A letter whose sender is gone is given to the engine at its end, or, if that was before, to the
//!    sender: to one of them, under the lock.

use std::collections::VecDeque;
use std::task::Waker;
use std::time::Instant;

use percpu::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use percpu::sync::{Condvar, Mutex, order, step};

/// The number of a place.
pub type SlotIndex = u32;

/// `sent`: nothing there.
const EMPTY: u32 = u32::MAX;
/// `sent`: nothing there, nor will there be.
const CLOSED: u32 = u32::MAX - 1;

/// A fixed number of places for letters `Q`, each of which gets a result `R`.
pub struct Mailbox<Q, R> {
    slots: Box<[Slot<Q, R>]>,
    free: Mutex<Vec<SlotIndex>>,
    /// The newest letter that was not taken, [`EMPTY`] or [`CLOSED`].
    sent: AtomicU32,
    /// Handles that may send.
    senders: AtomicUsize,
}

struct Slot<Q, R> {
    /// The letter sent before, while this one is in `sent`.
    next: AtomicU32,
    content: Mutex<Content<Q, R>>,
    /// Tells a sender that blocks.
    done: Condvar,
}

struct Content<Q, R> {
    request: Option<Q>,
    stage: Stage<R>,
}

enum Stage<R> {
    /// Without a result. The waker of who polls for it.
    Waiting(Option<Waker>),
    /// Without a result, and nobody wants it.
    Detached,
    Done(R),
    /// The engine is gone, and has not got the letter back from the kernel.
    Lost,
}

/// Why a letter was not sent.
pub enum SendError<Q> {
    /// Every place is taken.
    Full(Q),
    /// The engine takes no more.
    Closed(Q),
}

/// A letter that was sent.
#[must_use = "the engine may be asleep"]
pub struct Sent {
    /// Where it is.
    pub index: SlotIndex,
    /// Whether the sender must ring.
    pub notify: bool,
}

/// The letter and its result.
pub type Answer<Q, R> = (Q, R);

impl<Q, R> Mailbox<Q, R> {
    /// A mailbox of `slots`, and no sender; allocates all it ever will.
    pub fn new(slots: usize) -> Self {
        let slot = |_| Slot {
            next: AtomicU32::new(EMPTY),
            content: Mutex::new(Content { request: None, stage: Stage::Waiting(None) }),
            done: Condvar::new(),
        };
        assert!(slots < CLOSED as usize);
        Self {
            slots: (0..slots).map(slot).collect(),
            free: Mutex::new((0..slots as SlotIndex).rev().collect()),
            sent: AtomicU32::new(EMPTY),
            senders: AtomicUsize::new(0),
        }
    }

    /// How many letters it can hold.
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// How many places are free.
    pub fn free_len(&self) -> usize {
        self.free.lock().len()
    }

    fn slot(&self, index: SlotIndex) -> &Slot<Q, R> {
        &self.slots[index as usize]
    }

    fn release(&self, index: SlotIndex) {
        self.free.lock().push(index);
    }

    /// Sends a letter. Its result is to be collected, unless it is not `awaited`: then the letter
    /// comes out of [`finish`](Self::finish).
    ///
    /// # Errors
    ///
    /// [`SendError`] gives it back.
    pub fn send(&self, request: Q, awaited: bool) -> Result<Sent, SendError<Q>> {
        // Ordering: Relaxed; only spares the trouble: the exchange below finds it out for certain.
        if self.sent.load(Ordering::Relaxed) == CLOSED {
            return Err(SendError::Closed(request));
        }
        let Some(index) = self.free.lock().pop() else { return Err(SendError::Full(request)) };
        let slot = self.slot(index);
        let stage = if awaited { Stage::Waiting(None) } else { Stage::Detached };
        *slot.content.lock() = Content { request: Some(request), stage };
        // Ordering: Relaxed; the exchange says whether it is still so.
        let mut newest = self.sent.load(Ordering::Relaxed);
        loop {
            if newest == CLOSED {
                let request = slot.content.lock().request.take();
                self.release(index);
                return Err(SendError::Closed(request.expect("it was put there above")));
            }
            // Ordering: Relaxed; carried by the exchange.
            slot.next.store(newest, Ordering::Relaxed);
            let release = order!(Release, "send: the request is in its slot");
            // Ordering: Release pairs with the Acquire in `take`; it carries `next`, and by
            // whatever was released here before, theirs. Relaxed on failure: looked at again.
            match self.sent.compare_exchange(newest, index, release, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => newest = now,
            }
        }
        Ok(Sent { index, notify: newest == EMPTY })
    }

    /// Whether letters are there to be taken. Only a hint: the bell says so for certain.
    #[inline]
    pub fn has_requests(&self) -> bool {
        // Ordering: Relaxed; `take` acquires.
        self.sent.load(Ordering::Relaxed) < CLOSED
    }

    /// Engine: takes every letter, oldest first, behind those in `queue`. It allocates only if
    /// `queue` cannot hold as many as there are places.
    #[inline]
    pub fn take(&self, queue: &mut VecDeque<SlotIndex>) {
        if self.has_requests() {
            self.take_all(EMPTY, queue);
        }
    }

    /// Engine: takes every letter, and refuses others from now on. Once.
    pub fn close(&self, queue: &mut VecDeque<SlotIndex>) {
        step!("close: take what was sent", self.take_all(CLOSED, queue));
    }

    #[cold]
    fn take_all(&self, leave: u32, queue: &mut VecDeque<SlotIndex>) {
        // Ordering: Acquire pairs with the Release in `send`; it carries the chain of `next`. The
        // senders in between are read-modify-writes, so each one's Release reaches us.
        let mut newest = self.sent.swap(leave, Ordering::Acquire);
        let at = queue.len();
        while newest < CLOSED {
            queue.push_back(newest);
            // Ordering: Relaxed; carried by the swap.
            newest = self.slot(newest).next.load(Ordering::Relaxed);
        }
        let (mut front, mut back) = (at, queue.len());
        while front + 1 < back {
            back -= 1;
            queue.swap(front, back);
            front += 1;
        }
    }

    /// Engine: uses a letter that it took.
    pub fn with<T>(&self, index: SlotIndex, f: impl FnOnce(&mut Q) -> T) -> T {
        let mut content = self.slot(index).content.lock();
        f(content.request.as_mut().expect("it was taken and is not finished"))
    }

    /// Engine: stores the result of a letter that it took, and tells who waits for it. Gives the
    /// letter back if nobody does.
    ///
    /// Wakes, so it runs user code.
    pub fn finish(&self, index: SlotIndex, result: R) -> Option<Answer<Q, R>> {
        let slot = self.slot(index);
        let mut content = slot.content.lock();
        match std::mem::replace(&mut content.stage, Stage::Waiting(None)) {
            Stage::Waiting(waker) => {
                content.stage = Stage::Done(result);
                drop(content);
                // From here on the place may be another letter's: waking its sender does no harm.
                slot.done.notify_one();
                waker.into_iter().for_each(Waker::wake);
                None
            }
            Stage::Detached => {
                let request = content.request.take().expect("it was taken and is not finished");
                drop(content);
                self.release(index);
                Some((request, result))
            }
            Stage::Done(_) | Stage::Lost => unreachable!("finished twice"),
        }
    }

    /// Engine: whatever was not finished never will be, and its letter must not be touched.
    ///
    /// Wakes, so it runs user code.
    pub fn lose(&self) {
        for slot in &self.slots {
            let mut content = slot.content.lock();
            if let Stage::Waiting(waker) = &mut content.stage {
                let waker = waker.take();
                content.stage = Stage::Lost;
                drop(content);
                slot.done.notify_one();
                waker.into_iter().for_each(Waker::wake);
            }
        }
    }

    /// Sender: the letter and its result, if it is there.
    fn collect(&self, index: SlotIndex, content: &mut Content<Q, R>) -> Option<Answer<Q, R>> {
        match std::mem::replace(&mut content.stage, Stage::Waiting(None)) {
            Stage::Done(result) => {
                let request = content.request.take().expect("it is the sender's until collected");
                self.release(index);
                Some((request, result))
            }
            Stage::Lost => {
                content.stage = Stage::Lost;
                panic!("the engine is gone, and the kernel has not given the request back");
            }
            waiting => {
                content.stage = waiting;
                None
            }
        }
    }

    /// Sender: whether the result is there.
    pub fn is_done(&self, index: SlotIndex) -> bool {
        matches!(self.slot(index).content.lock().stage, Stage::Done(_))
    }

    /// Sender: the letter and its result, or `waker` is woken when they are there.
    ///
    /// # Panics
    ///
    /// Panics if the engine [lost](Self::lose) the letter.
    pub fn poll(&self, index: SlotIndex, waker: &Waker) -> Option<Answer<Q, R>> {
        let slot = self.slot(index);
        let answer = self.collect(index, &mut slot.content.lock());
        if answer.is_some() {
            return answer;
        }
        let waker = waker.clone(); // user code: not under the lock
        let mut content = slot.content.lock();
        let answer = self.collect(index, &mut content);
        if answer.is_some() {
            return answer;
        }
        let old = match &mut content.stage {
            Stage::Waiting(old) => old.replace(waker),
            _ => None,
        };
        drop(content);
        drop(old);
        None
    }

    /// Sender: the letter and its result; blocks until they are there, or it is `end`.
    ///
    /// # Panics
    ///
    /// As [`poll`](Self::poll).
    pub fn wait(&self, index: SlotIndex, end: Option<Instant>) -> Option<Answer<Q, R>> {
        let slot = self.slot(index);
        let mut content = slot.content.lock();
        loop {
            if let Some(answer) = self.collect(index, &mut content) {
                return Some(answer);
            }
            let Some(end) = end else {
                slot.done.wait(&mut content);
                continue;
            };
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            slot.done.wait_for(&mut content, left);
        }
    }

    /// Sender: does not wait any more. Gives the letter back if the engine is through with it.
    pub fn abandon(&self, index: SlotIndex) -> Option<Answer<Q, R>> {
        let slot = self.slot(index);
        let mut content = slot.content.lock();
        match &mut content.stage {
            Stage::Waiting(waker) => {
                let waker = waker.take();
                content.stage = Stage::Detached;
                drop(content);
                drop(waker);
                None
            }
            Stage::Lost => None,
            _ => self.collect(index, &mut content),
        }
    }

    /// One more handle may send.
    pub fn add_sender(&self) {
        // Ordering: Relaxed; whoever adds one has one, or is the engine.
        self.senders.fetch_add(1, Ordering::Relaxed);
    }

    /// One less. True for the last: then the bell must be rung.
    #[must_use = "the engine may be asleep"]
    pub fn drop_sender(&self) -> bool {
        // Ordering: Release pairs with the Acquire in `has_senders`; it carries what was sent.
        self.senders.fetch_sub(1, Ordering::Release) == 1
    }

    /// Engine: whether more letters may come. If not, the next `take` takes the last.
    pub fn has_senders(&self) -> bool {
        // Ordering: Acquire pairs with the Release in `drop_sender`: then `take` sees what that
        // handle has sent.
        self.senders.load(Ordering::Acquire) != 0
    }
}
