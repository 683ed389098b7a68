//! Gives the records of a thread back when it ends: behind everything that may still use them.
//!
//! The destructors of a thread's variables run one behind the other, and any of them may use a cache. So
//! the records are a key's of the C library, whose destructors it runs after those; and again, up to four
//! times, if one of them sets a key. In a model a variable's destructor does it.

use super::{MINE, Record};

#[cfg(not(any(offlock_loom, offlock_shuttle)))]
pub(super) fn release_at_end(new: &'static Record) {
    use percpu::sync::native::OnceLock;

    /// The records are given back by whoever finds them here.
    unsafe extern "C" fn end(_: *mut libc::c_void) {
        if let Some(record) = MINE.take() {
            record.release();
        }
    }
    static KEY: OnceLock<Option<libc::pthread_key_t>> = OnceLock::new();
    let key = KEY.get_or_init(|| {
        let mut key = 0;
        // SAFETY: a place for the key, and a function that takes any value.
        let error = unsafe { libc::pthread_key_create(&raw mut key, Some(end)) };
        (error == 0).then_some(key)
    });
    if let Some(key) = *key {
        // Where there is no memory for it, the thread's records stay taken for ever.
        // SAFETY: a key, never deleted; the value is never followed.
        let _ = unsafe { libc::pthread_setspecific(key, std::ptr::from_ref(new).cast()) };
    }
}

#[cfg(any(offlock_loom, offlock_shuttle))]
pub(super) fn release_at_end(new: &'static Record) {
    use std::cell::Cell;

    use percpu::sync::thread_local;

    struct Exit(Cell<Option<&'static Record>>);

    impl Drop for Exit {
        fn drop(&mut self) {
            let Some(record) = self.0.take() else { return };
            // This variable may outlive the other; nothing reads it then.
            let _ = MINE.try_with(|mine| mine.set(None));
            record.release();
        }
    }

    thread_local! {
        static EXIT: Exit = Exit(Cell::new(None));
    }
    let _ = EXIT.try_with(|exit| exit.0.set(Some(new)));
}

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests {
    use std::thread;

    use super::super::{Order, name, records};
    use crate::word::Entry;

    /// Looks at an entry when its thread ends.
    struct Late;

    impl Drop for Late {
        fn drop(&mut self) {
            let entry = Entry::new();
            name(&entry, Order::Fences).unwrap().clear();
        }
    }

    #[test]
    fn a_thread_that_looks_at_an_entry_as_it_ends_gives_its_record_back() {
        thread_local! {
            static FIRST: Late = const { Late };
            static LAST: Late = const { Late };
        }
        for first in [true, false] {
            let before = records().count();
            for _ in 0..200 {
                let thread = thread::spawn(move || {
                    // Destructors run in the order of the first uses, or in the other.
                    FIRST.with(|_| ());
                    let entry = Entry::new();
                    if first {
                        name(&entry, Order::Fences).unwrap().clear();
                    }
                    LAST.with(|_| ());
                });
                thread.join().unwrap();
            }
            let more = records().count() - before;
            assert!(more < 100, "{more} records for 200 threads, one at a time");
        }
    }
}
