//! The first of two futures, without the macro `select!`.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

/// The output of the future that was ready first.
#[derive(Debug)]
pub(crate) enum First<A, B> {
    Left(A),
    Right(B),
}

/// Waits for the first of two futures and drops the other one. `left` wins if both are ready.
pub(crate) async fn race<A: Future, B: Future>(left: A, right: B) -> First<A::Output, B::Output> {
    let (mut left, mut right) = (pin!(left), pin!(right));
    poll_fn(|context| match left.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(First::Left(output)),
        Poll::Pending => right.as_mut().poll(context).map(First::Right),
    })
    .await
}
