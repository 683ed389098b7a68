//! The fixed table of requests, and the lists that run through it.
//!
//! ```text
//!  slots | Pending | InFlight | Free | Ready | Done | ...      user data = generation << 32 | index
//!  free ────────────────────────┘       │
//!  pending (enqueue order) ─┘   ready ──┘
//! ```

use std::task::Waker;

use crate::cargo::Cargo;
use crate::file::File;
use crate::op::{Kind, Op};

pub(crate) type Index = u32;
const NIL: Index = Index::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Free,
    /// Queued, not yet the kernel's.
    Pending,
    /// The backend has it: buffer and file must stay.
    InFlight,
    /// Complete, waiting on the ready list to be delivered.
    Ready,
    /// Complete, waiting for its [`Operation`](crate::Operation) to collect it.
    Done,
}

/// Who gets the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Front {
    /// The cargo itself knows.
    Deliver,
    /// An [`Operation`](crate::Operation) will collect it.
    Future,
    /// Nobody: its operation was dropped. The buffer is freed at completion.
    Orphan,
}

pub(crate) struct Slot {
    pub(crate) state: State,
    pub(crate) front: Front,
    /// Zero what lies past the end of the file and count it as read.
    pub(crate) zero_fill: bool,
    /// EAGAIN and EINTR in a row.
    pub(crate) retries: u8,
    pub(crate) generation: u32,
    next: Index,
    pub(crate) op: Op,
    /// Bytes moved by earlier, short transfers.
    pub(crate) done: u64,
    /// Bytes, or errno. Valid in `Ready` and `Done`.
    pub(crate) result: Result<u64, i32>,
    pub(crate) file: Option<File>,
    pub(crate) cargo: Option<Cargo>,
    pub(crate) waker: Option<Waker>,
}

impl Slot {
    /// What to ask of the kernel next.
    pub(crate) fn next_op(&self) -> Op {
        self.op.rest(self.done)
    }

    /// A direct read that ended off the file's alignment: only the end of the file does that,
    /// and going on from there would be refused.
    pub(crate) fn ended_unaligned(&self) -> bool {
        let align = self.file.as_ref().and_then(File::alignment);
        align.is_some_and(|align| !self.done.is_multiple_of(align.offset.into()))
    }

    /// Zeroes what a read left of its buffer; returns the buffer's length.
    pub(crate) fn zero_rest(&mut self) -> u64 {
        debug_assert_eq!(self.op.kind, Kind::Read);
        let rest = self.op.rest(self.done);
        let len = (self.op.len - self.done) as usize;
        // SAFETY: a read's slot owns its `IoBufMut`, valid for `op.len` bytes; `rest.ptr` is
        // `done` bytes into it, and the kernel is through with it.
        unsafe { rest.ptr.write_bytes(0, len) };
        self.op.len
    }
}

/// A first-in first-out list through [`Slot::next`]; a slot is on at most one.
pub(crate) struct Fifo {
    head: Index,
    tail: Index,
    len: usize,
}

pub(crate) struct Slab {
    slots: Box<[Slot]>,
    free: Fifo,
}

impl Slab {
    pub(crate) fn new(capacity: usize) -> Self {
        const VACANT: Op = Op {
            kind: Kind::Nop,
            direct: false,
            fd: -1,
            ptr: std::ptr::null_mut(),
            len: 0,
            offset: 0,
        };
        assert!(capacity < NIL as usize);
        let slots = (0..capacity).map(|_| Slot {
            state: State::Free,
            front: Front::Deliver,
            zero_fill: false,
            retries: 0,
            generation: 0,
            next: NIL,
            op: VACANT,
            done: 0,
            result: Ok(0),
            file: None,
            cargo: None,
            waker: None,
        });
        let mut slab = Self { slots: slots.collect(), free: Fifo::new() };
        for index in 0..capacity as Index {
            Fifo::push(&mut slab.free, &mut slab.slots, index);
        }
        slab
    }

    /// Takes a free slot. The caller sets it up and gives it a state.
    pub(crate) fn alloc(&mut self) -> Option<Index> {
        self.free.pop(&mut self.slots)
    }

    /// Gives a slot back; its user data will never match again (for 2^32 uses of the slot).
    pub(crate) fn release(&mut self, index: Index) {
        let slot = &mut self.slots[index as usize];
        debug_assert!(slot.state != State::Free && slot.cargo.is_none() && slot.waker.is_none());
        slot.state = State::Free;
        slot.file = None;
        slot.generation = slot.generation.wrapping_add(1);
        // Newest first out: its cache lines are still here.
        self.free.push_front(&mut self.slots, index);
    }

    pub(crate) fn get(&mut self, index: Index) -> &mut Slot {
        &mut self.slots[index as usize]
    }

    pub(crate) fn peek(&self, index: Index) -> &Slot {
        &self.slots[index as usize]
    }

    pub(crate) fn user_data(&self, index: Index) -> u64 {
        u64::from(self.slots[index as usize].generation) << 32 | u64::from(index)
    }

    /// The in-flight slot a completion names; `None` if it names nothing in flight.
    pub(crate) fn in_flight(&self, user_data: u64) -> Option<Index> {
        let index = user_data as Index;
        let slot = self.slots.get(index as usize)?;
        let known = slot.state == State::InFlight && slot.generation == (user_data >> 32) as u32;
        known.then_some(index)
    }

    pub(crate) fn free_len(&self) -> usize {
        self.free.len
    }

    pub(crate) fn count(&self, state: State) -> usize {
        self.slots.iter().filter(|slot| slot.state == state).count()
    }

    pub(crate) fn push(&mut self, list: &mut Fifo, index: Index) {
        list.push(&mut self.slots, index);
    }

    pub(crate) fn pop(&mut self, list: &mut Fifo) -> Option<Index> {
        list.pop(&mut self.slots)
    }

    /// Indices on `list`, first to last.
    pub(crate) fn iter(&self, list: &Fifo) -> impl Iterator<Item = Index> {
        std::iter::successors((list.head != NIL).then_some(list.head), |&index| {
            let next = self.slots[index as usize].next;
            (next != NIL).then_some(next)
        })
    }
}

impl Fifo {
    pub(crate) fn new() -> Self {
        Self { head: NIL, tail: NIL, len: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    fn push(&mut self, slots: &mut [Slot], index: Index) {
        slots[index as usize].next = NIL;
        match self.tail {
            NIL => self.head = index,
            tail => slots[tail as usize].next = index,
        }
        self.tail = index;
        self.len += 1;
    }

    fn push_front(&mut self, slots: &mut [Slot], index: Index) {
        slots[index as usize].next = self.head;
        if self.head == NIL {
            self.tail = index;
        }
        self.head = index;
        self.len += 1;
    }

    fn pop(&mut self, slots: &mut [Slot]) -> Option<Index> {
        let index = self.head;
        if index == NIL {
            return None;
        }
        self.head = slots[index as usize].next;
        if self.head == NIL {
            self.tail = NIL;
        }
        self.len -= 1;
        Some(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_keep_order_and_slots_come_back() {
        let mut slab = Slab::new(3);
        let mut list = Fifo::new();
        for _ in 0..3 {
            let index = slab.alloc().unwrap();
            slab.get(index).state = State::Pending;
            slab.push(&mut list, index);
        }
        assert!(slab.alloc().is_none());
        assert_eq!(slab.iter(&list).collect::<Vec<_>>(), [0, 1, 2]);
        let first = slab.pop(&mut list).unwrap();
        slab.release(first);
        assert_eq!((slab.alloc(), slab.free_len()), (Some(first), 0));
    }

    #[test]
    fn stale_user_data_names_nothing() {
        let mut slab = Slab::new(1);
        let index = slab.alloc().unwrap();
        slab.get(index).state = State::InFlight;
        let user_data = slab.user_data(index);
        assert_eq!(slab.in_flight(user_data), Some(index));
        slab.release(index);
        let index = slab.alloc().unwrap();
        slab.get(index).state = State::InFlight;
        assert_eq!(slab.in_flight(user_data), None);
        assert_eq!(slab.in_flight(77), None);
    }
}
