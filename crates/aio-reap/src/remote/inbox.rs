//! The engine's end: takes letters, and finds slots for them.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::task::{Wake, Waker};

use percpu::sync::Arc;

use super::errand::Errand;
use super::hub::Hub;
use super::mailbox::Place;
use crate::books::Books;
use crate::deadlines::{Action, Deadlines};
use crate::slab::{Front, Slab};
use crate::sys;
use crate::wait_queue::WaitQueue;

/// What the engine has of its remotes' letters.
pub(crate) struct Inbox {
    hub: Arc<Hub>,
    /// Taken, and waiting for a slot.
    letters: VecDeque<Place>,
    /// Our place among the futures that wait for a slot, for the first of `letters`.
    ticket: Option<u64>,
    /// Makes the engine turn when it is the ticket's turn.
    waker: Waker,
}

struct Kick(Arc<OwnedFd>);

/// `Wake` wants std's `Arc`, whatever the facade's is.
impl Wake for Kick {
    fn wake(self: std::sync::Arc<Self>) {
        sys::signal(&self.0);
    }
}

impl Inbox {
    pub(crate) fn new(places: usize, bell: &Arc<OwnedFd>) -> Self {
        let hub = Hub::new(places, Arc::clone(bell));
        let waker = Waker::from(std::sync::Arc::new(Kick(Arc::clone(bell))));
        Self { hub, letters: VecDeque::with_capacity(places), ticket: None, waker }
    }

    pub(crate) fn hub(&self) -> &Arc<Hub> {
        &self.hub
    }

    /// Whether another thread may send letters.
    pub(crate) fn has_senders(&self) -> bool {
        self.hub.mailbox.has_senders()
    }

    /// The kernel has not given the buffers back, and never will.
    pub(crate) fn lose(&self) {
        self.hub.mailbox.lose();
    }

    /// Letters that a turn would find a slot for.
    pub(crate) fn pending(&self, waiting: &WaitQueue, slab: &Slab) -> usize {
        let is_next = |ticket| waiting.position(ticket) < slab.free_len();
        if self.ticket.is_some_and(is_next) { self.letters.len() } else { 0 }
    }

    /// Whether letters are there that were not taken.
    pub(crate) fn has_mail(&self) -> bool {
        self.hub.mailbox.has_mail()
    }

    /// Takes what was sent, and finds slots for as many as it can.
    pub(crate) fn turn(
        &mut self,
        books: &mut Books,
        waiting: &mut WaitQueue,
        deadlines: &mut Deadlines,
    ) {
        self.hub.mailbox.take(&mut self.letters);
        while let Some(&place) = self.letters.front() {
            let index = match self.ticket {
                None => books.slab.alloc(),
                Some(ticket) if waiting.position(ticket) < books.slab.free_len() => {
                    drop(waiting.leave(ticket));
                    books.slab.promised = waiting.len();
                    self.ticket = None;
                    books.slab.alloc_promised()
                }
                Some(_) => return,
            };
            let Some(index) = index else {
                self.ticket = Some(waiting.join(self.waker.clone()));
                books.slab.promised = waiting.len();
                return;
            };
            self.letters.pop_front();
            let errand = Errand::new(&self.hub, place);
            let (op, at_end, cancel_at) =
                self.hub.mailbox.with(place, |letter| (letter.op, letter.at_end, letter.cancel_at));
            books.queue(index, None, op, at_end, Front::Callback, errand);
            if let Some(at) = cancel_at {
                deadlines.add(at, index, Action::Cancel, &books.slab);
            }
        }
    }

    /// Refuses letters from now on; those that were sent are taken.
    pub(crate) fn close(&mut self) {
        self.hub.mailbox.close(&mut self.letters);
    }

    /// A letter that no slot was found for, when no turn is to come.
    pub(crate) fn refuse(&mut self, waiting: &mut WaitQueue) -> Option<Errand> {
        if let Some(ticket) = self.ticket.take() {
            drop(waiting.leave(ticket));
        }
        self.letters.pop_front().map(|place| Errand::new(&self.hub, place))
    }
}
