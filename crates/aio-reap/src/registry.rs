//! The numbers of an engine's registered files and buffers (io_uring's registered resources).
//!
//! A number is taken while a [`Registration`] lives. A registration may be dropped at any time,
//! even under a borrow of the engine's state, so its drop only stores the number. The engine
//! unregisters it from the kernel at its next turn.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// The maximum numbers of registered files and of registered buffer pools of one engine; guesses.
/// Later ones work unregistered.
pub(crate) const MAX_FILES: u16 = 256;
pub(crate) const MAX_BUFFERS: u16 = 32;

/// The kind of a registered resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    File,
    Buffer,
}

/// The numbers of one engine.
#[derive(Debug)]
pub(crate) struct Registry {
    files: Numbers,
    buffers: Numbers,
    /// A number was returned since the engine last called `collect`.
    returned: Cell<bool>,
}

/// The numbers of one kind of resource.
#[derive(Debug)]
struct Numbers {
    free: RefCell<Vec<u16>>,
    /// Numbers that are free but still registered with the kernel.
    returned: RefCell<Vec<u16>>,
}

impl Numbers {
    fn new(count: u16) -> Self {
        let returned = RefCell::new(Vec::with_capacity(count.into()));
        Self { free: RefCell::new((0..count).rev().collect()), returned }
    }
}

/// A taken number. The drop returns it.
#[derive(Debug)]
pub(crate) struct Registration {
    registry: Rc<Registry>,
    kind: Kind,
    number: u16,
}

impl Registry {
    pub(crate) fn new() -> Rc<Self> {
        let (files, buffers) = (Numbers::new(MAX_FILES), Numbers::new(MAX_BUFFERS));
        Rc::new(Self { files, buffers, returned: Cell::new(false) })
    }

    fn numbers(&self, kind: Kind) -> &Numbers {
        match kind {
            Kind::File => &self.files,
            Kind::Buffer => &self.buffers,
        }
    }

    /// Takes a number. Returns `None` if every number is taken.
    pub(crate) fn take(self: &Rc<Self>, kind: Kind) -> Option<Registration> {
        let number = self.numbers(kind).free.borrow_mut().pop()?;
        Some(Registration { registry: Rc::clone(self), kind, number })
    }

    pub(crate) fn has_returned(&self) -> bool {
        self.returned.get()
    }

    /// Passes each returned number to `unregister`, and makes it free.
    pub(crate) fn collect(&self, mut unregister: impl FnMut(Kind, u16)) {
        self.returned.set(false);
        for kind in [Kind::File, Kind::Buffer] {
            let numbers = self.numbers(kind);
            for number in numbers.returned.borrow_mut().drain(..) {
                unregister(kind, number);
                numbers.free.borrow_mut().push(number);
            }
        }
    }
}

impl Registration {
    pub(crate) fn number(&self) -> u16 {
        self.number
    }

    /// Returns the number if it belongs to `registry`. Another engine cannot use it.
    pub(crate) fn number_in(&self, registry: &Rc<Registry>) -> Option<u16> {
        Rc::ptr_eq(&self.registry, registry).then_some(self.number)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.registry.numbers(self.kind).returned.borrow_mut().push(self.number);
        self.registry.returned.set(true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_taken_again_once_the_kernel_has_forgotten_them() {
        let (registry, other) = (Registry::new(), Registry::new());
        let mut taken: Vec<_> =
            (0..MAX_BUFFERS).map(|_| registry.take(Kind::Buffer).expect("some are free")).collect();
        assert!(registry.take(Kind::Buffer).is_none());
        let last = taken.pop().unwrap();
        assert_eq!(last.number_in(&registry), Some(last.number()));
        assert_eq!(last.number_in(&other), None);
        let number = last.number();
        drop(last);
        assert!(registry.has_returned() && registry.take(Kind::Buffer).is_none());
        let mut seen = Vec::new();
        registry.collect(|kind, number| seen.push((kind, number)));
        assert_eq!(seen, [(Kind::Buffer, number)]);
        assert_eq!(registry.take(Kind::Buffer).unwrap().number(), number);
        assert_eq!(registry.take(Kind::File).unwrap().number(), 0);
    }
}
