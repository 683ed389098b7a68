//! Callbacks that count.

use std::cell::Cell;
use std::rc::Rc;

/// A callback that counts itself.
pub(crate) fn count(
    counter: &Rc<Cell<usize>>,
) -> impl FnOnce(Result<usize, aio_reap::RequestError>, ()) + use<> {
    let counter = Rc::clone(counter);
    move |result, ()| {
        result.unwrap();
        counter.set(counter.get() + 1);
    }
}
