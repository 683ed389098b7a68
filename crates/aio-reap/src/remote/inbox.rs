//! The engine's end: takes letters, and finds slots for them.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::task::{Wake, Waker};

use percpu::sync::Arc;

use super::mailbox::SlotIndex;
use super::pending::PendingRemote;
use super::shared::Shared;
use crate::completion_state::CompletionState;
use crate::deadlines::{Action, Deadlines};
use crate::slab::{CompletionTarget, Slab};
use crate::sys;
use crate::wait_queue::WaitQueue;

/// What the engine has of its remotes' letters.
pub(crate) struct Inbox {
    shared: Arc<Shared>,
    /// Taken, and waiting for a slot.
    taken: VecDeque<SlotIndex>,
    /// Our place among the futures that wait for a slot, for the first of `taken`.
    ticket: Option<u64>,
    /// Makes the engine turn when it is the ticket's turn.
    waker: Waker,
}

struct KickWaker(Arc<OwnedFd>);

/// `Wake` wants std's `Arc`, whatever the facade's is.
impl Wake for KickWaker {
    fn wake(self: std::sync::Arc<Self>) {
        sys::signal(&self.0);
    }
}

impl Inbox {
    pub(crate) fn new(slots: usize, kick: &Arc<OwnedFd>) -> Self {
        let shared = Shared::new(slots, Arc::clone(kick));
        let waker = Waker::from(std::sync::Arc::new(KickWaker(Arc::clone(kick))));
        Self { shared, taken: VecDeque::with_capacity(slots), ticket: None, waker }
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Whether another thread may send letters.
    pub(crate) fn has_senders(&self) -> bool {
        self.shared.mailbox.has_senders()
    }

    /// The kernel has not given the buffers back, and never will.
    pub(crate) fn lose(&self) {
        self.shared.mailbox.lose();
    }

    /// Letters that a turn would find a slot for.
    pub(crate) fn pending(&self, waiting: &WaitQueue, slab: &Slab) -> usize {
        let is_next = |ticket| waiting.position(ticket) < slab.free_len();
        if self.ticket.is_some_and(is_next) { self.taken.len() } else { 0 }
    }

    /// Whether letters are there that were not taken.
    pub(crate) fn has_requests(&self) -> bool {
        self.shared.mailbox.has_requests()
    }

    /// Takes what was sent, and finds slots for as many as it can.
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
            let pending = PendingRemote::new(&self.shared, sent);
            let (op, at_eof, cancel_at) = self
                .shared
                .mailbox
                .with(sent, |request| (request.op, request.at_eof, request.cancel_at));
            completions.queue(index, None, op, at_eof, CompletionTarget::Callback, pending);
            if let Some(at) = cancel_at {
                deadlines.add(at, index, Action::Cancel, &completions.slab);
            }
        }
    }

    /// Refuses letters from now on; those that were sent are taken.
    pub(crate) fn close(&mut self) {
        self.shared.mailbox.close(&mut self.taken);
    }

    /// A letter that no slot was found for, when no turn is to come.
    pub(crate) fn refuse(&mut self, waiting: &mut WaitQueue) -> Option<PendingRemote> {
        if let Some(ticket) = self.ticket.take() {
            drop(waiting.leave(ticket));
        }
        self.taken.pop_front().map(|sent| PendingRemote::new(&self.shared, sent))
    }
}
