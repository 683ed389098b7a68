//! Releases the hazard records of a thread when it ends, after all that may still use them.
//!
//! The destructors of a thread's variables may use a cache. A destructor of a `pthread` key
//! releases the records, because the C library runs it after those of the variables. It runs again,
//! up to four times, if a destructor sets the key again. In a model, the destructor of a variable
//! releases them.

use super::records::{MINE, Record};

#[cfg(not(offlock_model))]
pub(super) fn release_at_end(new: &'static Record) {
    use offlock_sync::native::OnceLock;

    /// Releases the records that `MINE` leads to, unless an earlier call has done so.
    unsafe extern "C" fn end(_: *mut libc::c_void) {
        if let Some(record) = MINE.take() {
            record.release();
        }
    }
    static KEY: OnceLock<Option<libc::pthread_key_t>> = OnceLock::new();
    let key = KEY.get_or_init(|| {
        let mut key = 0;
        // SAFETY: `key` is valid for a write, and `end` ignores its argument.
        let error = unsafe { libc::pthread_key_create(&raw mut key, Some(end)) };
        (error == 0).then_some(key)
    });
    if let Some(key) = *key {
        // If there is no memory for the value, the thread's records stay owned for ever.
        // SAFETY: the key was created and is never deleted; the value is not dereferenced.
        let _ = unsafe { libc::pthread_setspecific(key, std::ptr::from_ref(new).cast()) };
    }
}

#[cfg(offlock_model)]
pub(super) fn release_at_end(new: &'static Record) {
    use std::cell::Cell;

    use offlock_sync::thread_local;

    struct Exit(Cell<Option<&'static Record>>);

    impl Drop for Exit {
        fn drop(&mut self) {
            let Some(record) = self.0.take() else { return };
            // `MINE` may be gone already; then nothing reads it.
            let _ = MINE.try_with(|mine| mine.set(None));
            record.release();
        }
    }

    thread_local! {
        static EXIT: Exit = Exit(Cell::new(None));
    }
    let _ = EXIT.try_with(|exit| exit.0.set(Some(new)));
}

#[cfg(all(test, not(offlock_model)))]
mod tests {
    use std::thread;

    use super::super::protect;
    use super::super::records::records;
    use crate::word::Entry;

    /// Protects an entry when its thread ends.
    struct Late;

    impl Drop for Late {
        fn drop(&mut self) {
            let entry = Entry::new();
            protect(&entry).unwrap().clear();
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
                    // Destructors run in the order of the first uses, or in reverse.
                    FIRST.with(|_| ());
                    let entry = Entry::new();
                    if first {
                        protect(&entry).unwrap().clear();
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
