//! What the commands of one image share: syncs, and the thread that makes blocking calls.

use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Waker};

use super::change;
use crate::blocks::{Image, ignore_earlier, of_write};

impl Image {
    /// Makes everything written before durable. FLUSHes that come while a sync runs share the next
    /// one. A sync that has begun goes on if the future is dropped.
    pub(crate) async fn sync(&self) -> io::Result<()> {
        let sync = || async { ignore_earlier(self.device.sync_async().await) };
        change(sync).await.map_err(of_write)
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
