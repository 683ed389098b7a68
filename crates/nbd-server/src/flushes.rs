//! The FLUSHes of one image, which share syncs.
//!
//! ```text
//!  FLUSH ─► a sync waits? ─yes─► joins it
//!               └─no─► queues a sync ─► a thread runs syncs? ─yes─► it runs this one next
//!                                           └─no─► a thread begins to
//! ```
//!
//! A sync covers the FLUSHes that came before it began. So one sync runs at a time, however many
//! FLUSHes wait, and FLUSHes that come while it runs share the next one. They occupy one thread of
//! the cache.

use std::future::poll_fn;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::{Poll, Waker};

use percpu::sync::Mutex;

/// The syncs of one image.
#[derive(Debug, Default)]
pub(crate) struct Flushes(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// A thread runs syncs until none waits.
    runs: bool,
    /// The sync that begins next.
    next: Option<Arc<Sync>>,
}

/// A sync that several FLUSHes wait for.
#[derive(Debug, Default)]
pub(crate) struct Sync(Mutex<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    /// The result, once the sync has ended: 0 or an errno.
    errno: Option<i32>,
    wakers: Vec<Waker>,
}

impl Flushes {
    /// Returns a sync that has not begun, and whether the caller must start a thread that calls
    /// [`run`](Self::run).
    pub(crate) fn join(&self) -> (Arc<Sync>, bool) {
        let mut state = self.0.lock();
        let sync = Arc::clone(state.next.get_or_insert_default());
        (sync, !std::mem::replace(&mut state.runs, true))
    }

    /// Runs syncs until none waits. If `sync` panics, its FLUSHes fail.
    pub(crate) fn run(&self, mut sync: impl FnMut() -> io::Result<()>) {
        loop {
            let mut state = self.0.lock();
            let Some(next) = state.next.take() else {
                state.runs = false;
                return;
            };
            drop(state);
            let result = catch_unwind(AssertUnwindSafe(&mut sync));
            next.end(match result {
                Ok(Ok(())) => 0,
                Ok(Err(error)) => error.raw_os_error().unwrap_or(libc::EIO),
                Err(_) => libc::EIO,
            });
        }
    }
}

impl Sync {
    fn end(&self, errno: i32) {
        let mut waiting = self.0.lock();
        waiting.errno = Some(errno);
        let wakers = std::mem::take(&mut waiting.wakers);
        drop(waiting);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Waits for the end of the sync, which continues if this future is dropped.
    pub(crate) async fn wait(&self) -> io::Result<()> {
        poll_fn(|context| {
            let mut waiting = self.0.lock();
            match waiting.errno {
                Some(0) => Poll::Ready(Ok(())),
                Some(errno) => Poll::Ready(Err(io::Error::from_raw_os_error(errno))),
                None => {
                    if !waiting.wakers.iter().any(|waker| waker.will_wake(context.waker())) {
                        waiting.wakers.push(context.waker().clone());
                    }
                    Poll::Pending
                }
            }
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::Context;

    use super::*;

    fn poll(sync: &Sync) -> Option<Result<(), Option<i32>>> {
        let poll = pin!(sync.wait()).poll(&mut Context::from_waker(Waker::noop()));
        match poll {
            Poll::Ready(result) => Some(result.map_err(|error| error.raw_os_error())),
            Poll::Pending => None,
        }
    }

    /// A sync does not cover FLUSHes that come while it runs. They share the next one.
    #[test]
    fn flushes_share_the_sync_that_begins_after_them() {
        let flushes = Flushes::default();
        let (first, begins) = flushes.join();
        let (second, again) = flushes.join();
        assert!(begins && !again && Arc::ptr_eq(&first, &second));
        let (mut calls, mut later) = (0, Vec::new());
        flushes.run(|| {
            calls += 1;
            match calls {
                1 => {
                    later.extend((0..100).map(|_| flushes.join()));
                    Ok(())
                }
                2 => {
                    assert_eq!((poll(&first), poll(&later[0].0)), (Some(Ok(())), None));
                    later.push(flushes.join());
                    Err(io::Error::from_raw_os_error(libc::ENOSPC))
                }
                _ => panic!("it fails"),
            }
        });
        assert_eq!(calls, 3);
        let (last, rest) = later.split_last().unwrap();
        assert!(later.iter().all(|(_, begins)| !begins));
        assert!(rest.iter().all(|(sync, _)| poll(sync) == Some(Err(Some(libc::ENOSPC)))));
        assert_eq!(poll(&last.0), Some(Err(Some(libc::EIO))));
        assert!(flushes.join().1, "none runs");
    }
}
