//! A thread's record of messages.

use std::collections::BTreeMap;

/// A set of distinct numbers, represented by a count and a sum.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Sum {
    pub(crate) count: u64,
    hash: u64,
}

impl Sum {
    pub(crate) fn add(&mut self, value: u64) {
        self.count += 1;
        let mixed = (value ^ value >> 31).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.hash = self.hash.wrapping_add(mixed ^ mixed >> 29);
    }

    fn and(self, other: Self) -> Self {
        Self { count: self.count + other.count, hash: self.hash.wrapping_add(other.hash) }
    }
}

/// The number of a message: its sender, its priority, and its serial among these.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Number {
    pub(crate) sender: u8,
    pub(crate) priority: u8,
    pub(crate) serial: u32,
}

impl Number {
    pub(crate) fn to_bits(self) -> u64 {
        u64::from(self.sender) << 48 | u64::from(self.priority) << 32 | u64::from(self.serial)
    }

    pub(crate) fn from_bits(bits: u64) -> Self {
        Self { sender: (bits >> 48) as u8, priority: (bits >> 32) as u8, serial: bits as u32 }
    }
}

#[derive(Default)]
pub(crate) struct Ledger {
    /// Messages whose send succeeded.
    pub(crate) accepted: Sum,
    /// Messages received, drained or dropped.
    pub(crate) taken: Sum,
    /// The next serial for each sender and priority.
    next: BTreeMap<(u8, u8), u32>,
    /// The last serial received from each sender and priority.
    last: BTreeMap<(u8, u8), u32>,
}

impl Ledger {
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            accepted: self.accepted.and(other.accepted),
            taken: self.taken.and(other.taken),
            ..Self::default()
        }
    }

    /// Returns a number for the next message.
    pub(crate) fn number(&mut self, sender: u8, priority: u8) -> Number {
        let next = self.next.entry((sender, priority)).or_default();
        *next += 1;
        Number { sender, priority, serial: *next }
    }

    /// Records a received message; `in_order` if it was the oldest of its priority.
    pub(crate) fn take(&mut self, bits: u64, in_order: bool) -> Number {
        self.taken.add(bits);
        let number = Number::from_bits(bits);
        if in_order {
            let last = self.last.entry((number.sender, number.priority)).or_default();
            assert!(*last < number.serial, "{number:?} came after {last}");
            *last = number.serial;
        }
        number
    }
}
