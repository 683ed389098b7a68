//! What the commands of one image share: syncs, and the thread that makes blocking calls.

use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Waker};

use super::{PATIENCE, change};
use crate::blocks::{Image, of_write};

impl Image {
    /// Makes everything written before durable.
    pub(crate) async fn sync(self: &Arc<Self>) -> io::Result<()> {
        if self.has_bug("flush-without-a-sync") {
            return change(|| self.device.flush_async()).await.map_err(of_write);
        }
        let (sync, begins) = self.flushes.join();
        if begins {
            let image = Arc::clone(self);
            let run = move |_| image.flushes.run(|| image.sync_within(PATIENCE));
            // The first poll starts the call. It continues without this future, because other
            // requests may wait for it.
            let call = pin!(self.device.call_async(run));
            let _ = call.poll(&mut Context::from_waker(Waker::noop()));
        }
        sync.wait().await
    }

    /// Runs a blocking call on a thread of the cache, in turn with the image's other calls.
    pub(crate) async fn call<T: Send + 'static>(
        self: &Arc<Self>,
        call: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> T {
        let image = Arc::clone(self);
        let begin = || {
            let image = Arc::clone(self);
            // The first poll starts the call, which continues without this future.
            let run = pin!(self.device.call_async(move |_| image.calls.run()));
            let _ = run.poll(&mut Context::from_waker(Waker::noop()));
        };
        self.calls.make(move || call(&image), begin).await
    }
}
