//! The engine's side of the mailbox: it takes requests and finds slots for them.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::task::{Wake, Waker};

use percpu::sync::Arc;

use super::mailbox::SlotIndex;
use super::pending::PendingRemote;
use super::shared::Shared;
use crate::completion_state::{CompletionState, NewRequest};
use crate::deadlines::{Action, Deadlines};
use crate::slab::{CompletionTarget, Slab};
use crate::sys;
use crate::wait_queue::WaitQueue;

/// The requests of an engine's remotes.
pub(crate) struct Inbox {
    shared: Arc<Shared>,
    /// Requests that were taken from the mailbox and wait for a slot, as indices of the mailbox.
    taken: VecDeque<SlotIndex>,
    /// The user data of the last engine's slot of each slot of the mailbox.
    user_data: Box<[u64]>,
    /// The position of the first of `taken` among the futures that wait for a slot.
    ticket: Option<u64>,
    /// A request that got a slot is to be cancelled.
    cancel_taken: bool,
    /// The user data of requests whose cancellation the backend refused, to try it again. At most one
    /// per slot of the mailbox, because those that have completed are removed before later requests
    /// are in flight.
    pub(crate) refused_cancels: Vec<u64>,
    /// Causes a turn of the engine when the ticket may take a slot.
    waker: Waker,
}

/// A waker that signals the engine's kick.
struct KickWaker(Arc<OwnedFd>);

/// `Wake` needs std's `Arc`, even if the facade has another one.
impl Wake for KickWaker {
    fn wake(self: std::sync::Arc<Self>) {
        sys::signal(&self.0);
    }
}

impl Inbox {
    pub(crate) fn new(slots: usize, kick: &Arc<OwnedFd>) -> Self {
        let shared = Shared::new(slots, Arc::clone(kick));
        let waker = Waker::from(std::sync::Arc::new(KickWaker(Arc::clone(kick))));
        let user_data = vec![u64::MAX; slots].into();
        Self {
            shared,
            taken: VecDeque::with_capacity(slots),
            user_data,
            ticket: None,
            cancel_taken: false,
            refused_cancels: Vec::with_capacity(slots),
            waker,
        }
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Returns whether a remote is left.
    pub(crate) fn has_senders(&self) -> bool {
        self.shared.mailbox.has_senders()
    }

    /// Ends every request without a result. Called if the kernel may use their buffers for ever.
    pub(crate) fn lose(&self) {
        self.shared.mailbox.lose();
    }

    /// Returns the number of taken requests if the first of them may take a slot now, otherwise 0.
    pub(crate) fn pending(&self, waiting: &WaitQueue, slab: &Slab) -> usize {
        let is_next = |ticket| waiting.position(ticket) < slab.free_len();
        if self.ticket.is_some_and(is_next) { self.taken.len() } else { 0 }
    }

    /// Returns whether the mailbox has requests.
    pub(crate) fn has_requests(&self) -> bool {
        self.shared.mailbox.has_requests()
    }

    /// Returns whether a request is to be cancelled.
    pub(crate) fn has_cancels(&self) -> bool {
        self.cancel_taken || self.shared.mailbox.has_cancels()
    }

    /// Passes the user data of every request to cancel to `cancel`, which returns false if no slot
    /// has it. Such a request is cancelled when it gets one.
    pub(crate) fn take_cancels(&mut self, mut cancel: impl FnMut(u64) -> bool) {
        self.cancel_taken = false;
        self.shared.mailbox.take_cancels(|sent| cancel(self.user_data[sent as usize]));
    }

    /// Takes the sent requests, and finds slots for as many as possible.
    pub(crate) fn turn(
        &mut self,
        completions: &mut CompletionState,
        waiting: &mut WaitQueue,
        deadlines: &mut Deadlines,
    ) {
        self.shared.mailbox.take(&mut self.taken);
        while let Some(&sent) = self.taken.front() {
            let index = match self.ticket {
                None => completions.slab.alloc(),
                Some(ticket) if waiting.position(ticket) < completions.slab.free_len() => {
                    drop(waiting.leave(ticket));
                    completions.slab.promised = waiting.len();
                    self.ticket = None;
                    completions.slab.alloc_promised()
                }
                Some(_) => return,
            };
            let Some(index) = index else {
                self.ticket = Some(waiting.join(self.waker.clone()));
                completions.slab.promised = waiting.len();
                return;
            };
            self.taken.pop_front();
            let payload = PendingRemote::new(&self.shared, sent);
            let (op, at_eof, cancel_at) = self
                .shared
                .mailbox
                .with(sent, |request| (request.op, request.at_eof, request.cancel_at));
            let target = CompletionTarget::Callback;
            let request = NewRequest { file: None, op, at_eof, target, payload };
            self.user_data[sent as usize] = completions.queue(index, request, |_, _| false);
            if self.shared.mailbox.is_cancelled(sent) {
                self.cancel_taken = true; // the sender did not wait for the slot
            }
            if let Some(at) = cancel_at {
                deadlines.add(at, index, Action::Cancel, &completions.slab);
            }
        }
    }

    /// Refuses later requests, and takes the sent ones.
    pub(crate) fn close(&mut self) {
        self.shared.mailbox.close(&mut self.taken);
    }

    /// Returns a request that has no slot, to refuse it. Called when no turn follows.
    pub(crate) fn refuse(&mut self, waiting: &mut WaitQueue) -> Option<PendingRemote> {
        if let Some(ticket) = self.ticket.take() {
            drop(waiting.leave(ticket));
        }
        self.taken.pop_front().map(|sent| PendingRemote::new(&self.shared, sent))
    }
}
