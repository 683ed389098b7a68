//! The mailbox through which other threads send requests to an engine and get the results.
//!
//! ```text
//!  sender:  free ─► store request ─► sent (a stack; notify if it was empty) ─► wait ─► collect ─► free
//!  engine:                  clear the notifier ─► take all, oldest first ─► finish ─┘
//! ```
//!
//! # Invariants
//!
//! 1. A slot has exactly one owner: the list `free`; a thread in `send`; the list `sent`; the
//!    engine, from `take` to `finish`; the waiting sender, from `finish` until it collects the
//!    result.
//! 2. If `sent` is not empty, the notifier was signalled after the engine's last `take`, or will
//!    be: the sender that makes the list non-empty signals after its request is in the list. The
//!    engine clears the notifier before it takes.
//! 3. No wake-up is lost: the result is stored under the lock of its slot, and a sender checks for
//!    the result and registers to be woken under one hold of that lock.
//! 4. A request whose sender stops waiting is returned once, under the lock: to the engine by
//!    `finish`, or, if the result was stored before, to the sender by `abandon`.
//! 5. A request whose sender asks for a cancellation is marked under the lock of its slot before
//!    `cancels` is set, and the sender that sets it signals. The engine clears the notifier, then
//!    `cancels`, and then looks at every slot.

use std::collections::VecDeque;
use std::task::Waker;
use std::time::Instant;

use percpu::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use percpu::sync::{Condvar, Mutex, order, step};

/// The number of a slot of a mailbox.
pub type SlotIndex = u32;

/// A value of `sent`: the list is empty.
const EMPTY: u32 = u32::MAX;
/// A value of `sent`: the list is empty, and the mailbox is closed.
const CLOSED: u32 = u32::MAX - 1;

/// A fixed number of slots for requests `Q`, each of which gets a result `R`.
#[expect(missing_debug_implementations, reason = "for model checkers only")]
pub struct Mailbox<Q, R> {
    slots: Box<[Slot<Q, R>]>,
    free: Mutex<Vec<SlotIndex>>,
    /// The newest request that was not taken, [`EMPTY`] or [`CLOSED`].
    sent: AtomicU32,
    /// The number of handles that may send.
    senders: AtomicUsize,
    /// A sender has asked for a cancellation since the last [`take_cancels`](Self::take_cancels).
    cancels: AtomicBool,
}

/// A slot for one request.
struct Slot<Q, R> {
    /// The next older request in `sent`, while this one is in it.
    next: AtomicU32,
    content: Mutex<Content<Q, R>>,
    /// Wakes a sender that blocks.
    done: Condvar,
}

/// The request of a slot, and the stage that it has reached.
struct Content<Q, R> {
    request: Option<Q>,
    stage: Stage<R>,
    /// The number of requests that the slot has had, which wraps.
    generation: u32,
    /// The sender wants the request to be cancelled.
    cancel: bool,
}

/// The stage of a request.
enum Stage<R> {
    /// There is no result yet. The waker is that of the task that polls for it.
    Waiting(Option<Waker>),
    /// There is no result yet, and no sender waits for it.
    Detached,
    Done(R),
    /// There will be no result: the engine was dropped while the kernel used the request's buffer.
    Lost,
}

/// The reason why a request was not sent, with the request.
#[expect(missing_debug_implementations, reason = "for model checkers only")]
pub enum SendError<Q> {
    /// Every slot is taken.
    Full(Q),
    /// The mailbox is closed.
    Closed(Q),
}

/// The result of [`Mailbox::send`].
#[must_use = "the engine may be asleep"]
#[derive(Debug)]
pub struct Sent {
    /// The slot of the request.
    pub index: SlotIndex,
    /// The generation of the slot, which no later request has until it wraps.
    pub generation: u32,
    /// Whether the sender must signal the notifier.
    pub notify: bool,
}

/// A request and its result.
pub type Answer<Q, R> = (Q, R);

impl<Q, R> Mailbox<Q, R> {
    /// Makes a mailbox of `slots` without a sender. Later calls do not allocate.
    pub fn new(slots: usize) -> Self {
        let slot = |_| Slot {
            next: AtomicU32::new(EMPTY),
            content: Mutex::new(Content {
                request: None,
                stage: Stage::Waiting(None),
                generation: 0,
                cancel: false,
            }),
            done: Condvar::new(),
        };
        assert!(slots < CLOSED as usize);
        Self {
            slots: (0..slots).map(slot).collect(),
            free: Mutex::new((0..slots as SlotIndex).rev().collect()),
            sent: AtomicU32::new(EMPTY),
            senders: AtomicUsize::new(0),
            cancels: AtomicBool::new(false),
        }
    }

    /// Returns the number of slots.
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Returns the number of free slots.
    pub fn free_len(&self) -> usize {
        self.free.lock().len()
    }

    fn slot(&self, index: SlotIndex) -> &Slot<Q, R> {
        &self.slots[index as usize]
    }

    fn release(&self, index: SlotIndex) {
        self.free.lock().push(index);
    }

    /// Sends a request. With `awaited` the sender collects the result. Otherwise
    /// [`finish`](Self::finish) returns the request to the engine.
    ///
    /// # Errors
    ///
    /// [`SendError`] returns the request.
    pub fn send(&self, request: Q, awaited: bool) -> Result<Sent, SendError<Q>> {
        // Ordering: Relaxed; a shortcut. The exchange below decides.
        if self.sent.load(Ordering::Relaxed) == CLOSED {
            return Err(SendError::Closed(request));
        }
        let Some(index) = self.free.lock().pop() else { return Err(SendError::Full(request)) };
        let slot = self.slot(index);
        let stage = if awaited { Stage::Waiting(None) } else { Stage::Detached };
        let generation = {
            let mut content = slot.content.lock();
            let generation = content.generation.wrapping_add(1);
            *content = Content { request: Some(request), stage, generation, cancel: false };
            generation
        };
        // Ordering: Relaxed; the exchange fails if the value has changed.
        let mut newest = self.sent.load(Ordering::Relaxed);
        loop {
            if newest == CLOSED {
                let request = slot.content.lock().request.take();
                self.release(index);
                return Err(SendError::Closed(request.expect("it was stored above")));
            }
            // Ordering: Relaxed; the exchange publishes it.
            slot.next.store(newest, Ordering::Relaxed);
            let release = order!(Release, "send: the request is in its slot");
            // Ordering: Release pairs with the Acquire in `take_all`; it carries `next`. The
            // exchanges form a release sequence, so the Acquire also sees the `next` of older
            // requests. Relaxed on failure: the value is only compared again.
            match self.sent.compare_exchange(newest, index, release, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => newest = now,
            }
        }
        Ok(Sent { index, generation, notify: newest == EMPTY })
    }

    /// Returns whether there are requests to take. Only a hint: the notifier is reliable.
    #[inline]
    pub fn has_requests(&self) -> bool {
        // Ordering: Relaxed; a hint. `take_all` acquires before it reads a request.
        self.sent.load(Ordering::Relaxed) < CLOSED
    }

    /// Engine: moves every sent request to the end of `queue`, oldest first. Allocates only if
    /// `queue` has less capacity than the mailbox has slots.
    #[inline]
    pub fn take(&self, queue: &mut VecDeque<SlotIndex>) {
        if self.has_requests() {
            self.take_all(EMPTY, queue);
        }
    }

    /// Engine: takes every sent request and closes the mailbox. Called once.
    pub fn close(&self, queue: &mut VecDeque<SlotIndex>) {
        step!("close: take what was sent", self.take_all(CLOSED, queue));
    }

    #[cold]
    fn take_all(&self, leave: u32, queue: &mut VecDeque<SlotIndex>) {
        // Ordering: Acquire pairs with the Release in `send`; it carries the chain of `next`. The
        // exchanges of several senders form a release sequence, so it carries the writes of each.
        let mut newest = self.sent.swap(leave, order!(Acquire, "take_all: the chain is linked"));
        let at = queue.len();
        while newest < CLOSED {
            queue.push_back(newest);
            // Ordering: Relaxed; the swap above acquired it.
            newest = self.slot(newest).next.load(Ordering::Relaxed);
        }
        let (mut front, mut back) = (at, queue.len());
        while front + 1 < back {
            back -= 1;
            queue.swap(front, back);
            front += 1;
        }
    }

    /// Engine: calls `f` with a request that it took.
    pub fn with<T>(&self, index: SlotIndex, f: impl FnOnce(&mut Q) -> T) -> T {
        let mut content = self.slot(index).content.lock();
        f(content.request.as_mut().expect("a taken request stays until `finish`"))
    }

    /// Engine: stores the result of a request that it took and wakes the sender. If no sender waits
    /// for the result, returns the request and the result.
    ///
    /// It wakes, so it runs user code.
    pub fn finish(&self, index: SlotIndex, result: R) -> Option<Answer<Q, R>> {
        let slot = self.slot(index);
        let mut content = slot.content.lock();
        match std::mem::replace(&mut content.stage, Stage::Waiting(None)) {
            Stage::Waiting(waker) => {
                content.stage = Stage::Done(result);
                drop(content);
                // From here on the slot may have another request. A wake-up of its sender does no
                // harm.
                slot.done.notify_one();
                waker.into_iter().for_each(Waker::wake);
                None
            }
            Stage::Detached => {
                let request = content.request.take().expect("a taken request stays until `finish`");
                drop(content);
                self.release(index);
                Some((request, result))
            }
            Stage::Done(_) | Stage::Lost => unreachable!("finished twice"),
        }
    }

    /// Engine: marks every unfinished request that a sender waits for as lost. Its content must not be
    /// used.
    ///
    /// It wakes, so it runs user code.
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

    /// Sender: takes the request and its result, if there is one.
    fn collect(&self, index: SlotIndex, content: &mut Content<Q, R>) -> Option<Answer<Q, R>> {
        match std::mem::replace(&mut content.stage, Stage::Waiting(None)) {
            Stage::Done(result) => {
                let request =
                    content.request.take().expect("a finished request stays until it is collected");
                self.release(index);
                Some((request, result))
            }
            Stage::Lost => {
                content.stage = Stage::Lost;
                panic!("the engine was dropped while the kernel used the request's buffer");
            }
            waiting => {
                content.stage = waiting;
                None
            }
        }
    }

    /// Sender: returns whether there is a result.
    pub fn is_done(&self, index: SlotIndex) -> bool {
        matches!(self.slot(index).content.lock().stage, Stage::Done(_))
    }

    /// Sender: takes the request and its result. If there is no result, registers `waker`, which is
    /// woken when there is one.
    ///
    /// # Panics
    ///
    /// Panics if the request is [lost](Self::lose).
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

    /// Sender: blocks until there is a result, and takes it with the request. Returns `None` at
    /// `end`.
    ///
    /// # Panics
    ///
    /// Panics like [`poll`](Self::poll).
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

    /// Sender: stops waiting. Returns the request and its result if there is one.
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

    /// Sender: asks the engine to cancel the request. Returns whether the caller must signal the
    /// notifier, or `None` if there is a result already.
    pub fn cancel(&self, index: SlotIndex) -> Option<bool> {
        self.cancel_if(index, |content| matches!(content.stage, Stage::Waiting(_)))
    }

    /// Sender: the same for a request without a waiting sender, which may have left the slot.
    pub fn cancel_detached(&self, index: SlotIndex, generation: u32) -> Option<bool> {
        self.cancel_if(index, |content| {
            content.request.is_some() && content.generation == generation
        })
    }

    fn cancel_if(
        &self,
        index: SlotIndex,
        is_pending: impl FnOnce(&Content<Q, R>) -> bool,
    ) -> Option<bool> {
        let mut content = self.slot(index).content.lock();
        if !is_pending(&content) {
            return None;
        }
        content.cancel = true;
        drop(content);
        // Ordering: Relaxed; the lock of the slot orders. If the engine's exchange reads this
        // value, its later hold of the lock is not before ours: it would then happen before this
        // exchange, whose value it could not have read.
        Some(!self.cancels.swap(true, Ordering::Relaxed))
    }

    /// Engine: returns whether a sender has asked for a cancellation. Only a hint, like
    /// [`has_requests`](Self::has_requests).
    #[inline]
    pub fn has_cancels(&self) -> bool {
        // Ordering: Relaxed; a hint. The notifier is reliable.
        self.cancels.load(Ordering::Relaxed)
    }

    /// Engine: passes every request whose sender asks for its cancellation to `cancel`. Until that
    /// returns true the request stays marked, for [`is_cancelled`](Self::is_cancelled).
    pub fn take_cancels(&self, mut cancel: impl FnMut(SlotIndex) -> bool) {
        // Ordering: Relaxed; `cancel` says why.
        self.cancels.swap(false, Ordering::Relaxed);
        for (index, slot) in (0..).zip(&self.slots) {
            let mut content = slot.content.lock();
            if content.cancel {
                content.cancel = !cancel(index);
            }
        }
    }

    /// Engine: returns whether the sender of a request has asked for its cancellation.
    pub fn is_cancelled(&self, index: SlotIndex) -> bool {
        self.slot(index).content.lock().cancel
    }

    /// Adds a handle that may send.
    pub fn add_sender(&self) {
        // Ordering: Relaxed; the caller has a handle or is the engine, so the count is not read as
        // 0 meanwhile.
        self.senders.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes a handle. Returns true for the last one; the caller must then signal the notifier.
    #[must_use = "the engine may be asleep"]
    pub fn drop_sender(&self) -> bool {
        // Ordering: Release pairs with the Acquire in `has_senders`; it carries the requests that
        // this handle sent.
        let release = order!(Release, "drop_sender: its requests are sent");
        self.senders.fetch_sub(1, release) == 1
    }

    /// Engine: returns whether a handle is left. If not, the next `take` takes the last request.
    pub fn has_senders(&self) -> bool {
        // Ordering: Acquire pairs with the Release in `drop_sender`; it carries the requests that
        // the handle sent, so a later `take` finds them.
        let acquire = order!(Acquire, "has_senders: the last request is sent");
        self.senders.load(acquire) != 0
    }
}
