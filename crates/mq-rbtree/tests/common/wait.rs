//! The forms of an operation that waits, chosen at run time.
#![allow(dead_code, reason = "each test program uses some of them")]

use std::time::Instant;

use mq_rbtree::{Levels, Queue, ReceiveError, Received, SendError};

#[derive(Clone, Copy, Debug)]
pub(crate) enum Wait {
    No,
    Until(Instant),
    Forever,
}

impl Wait {
    pub(crate) fn send<T, L: Levels>(
        self,
        queue: &Queue<T, L>,
        value: T,
        priority: L::Priority,
    ) -> Result<(), SendError<T>> {
        match self {
            Self::No => queue.try_send(value, priority),
            Self::Until(end) => queue.send_deadline(value, priority, end),
            Self::Forever => queue.send(value, priority),
        }
    }

    pub(crate) fn receive<T, L: Levels>(
        self,
        queue: &Queue<T, L>,
    ) -> Result<Received<T, L>, ReceiveError> {
        match self {
            Self::No => queue.try_receive(),
            Self::Until(end) => queue.receive_deadline(end),
            Self::Forever => queue.receive(),
        }
    }
}
