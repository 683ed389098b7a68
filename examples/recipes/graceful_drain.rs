//! Sessions that are registered, cancelled and drained: see `graceful_drain.md`.
//!
//! Run:     cargo run -p examples --example graceful_drain
//! Prints:  100 sessions ended once: 40 left, 1 kicked, 59 at the shutdown

use std::error::Error;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use radix_ctx::{CtxRef, CtxTable, Id, rcu};
use tokio::runtime::Builder;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

const SESSIONS: u64 = 100;
/// The time that the sessions have for their last words.
const GRACE: Duration = Duration::from_millis(300);

struct Session {
    user: u64,
    requests: AtomicU64,
}

#[derive(Default)]
struct Server {
    sessions: CtxTable<Session>,
    /// The invoices: one for each session, with the reason of its end.
    ended: Mutex<Vec<(u64, &'static str)>>,
}

impl Server {
    /// Ends a session for `reason`, unless it has ended. Of several callers one gets `Ok` of the removal, so what
    /// follows it runs once.
    fn end(&self, id: Id, reason: &'static str) {
        let Ok(session) = self.sessions.get_ref(id) else { return };
        if self.sessions.remove(id).is_ok() {
            self.ended.lock().unwrap().push((session.user, reason));
        }
    }

    /// Serves one client, until it leaves or its session is removed.
    async fn serve(&self, session: CtxRef<Session>) {
        let id = CtxRef::id(&session);
        tokio::select! {
            () = requests(&session) => self.end(id, "left"),
            () = CtxRef::removed(&session) => {} // the remover has ended it
        }
        sleep(Duration::from_millis(5)).await; // says goodbye: the session is there until the reference drops
        session.requests.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends all sessions, and waits for their tasks. Returns whether all have ended in time.
    async fn shut_down(&self) -> bool {
        let ids: Vec<Id> = self.sessions.iter(&rcu::pin()).map(|(id, _)| id).collect();
        ids.into_iter().for_each(|id| self.end(id, "shutdown"));
        let mut removed = self.sessions.begin_remove_all(); // none is left; this waits for the drops
        timeout(GRACE, async {
            while !removed.is_done() {
                sleep(Duration::from_millis(1)).await;
            }
        })
        .await
        .is_ok()
    }
}

/// The requests of a client, until it leaves. Two of five clients leave; the others stay.
async fn requests(session: &Session) {
    while session.user % 5 > 1 || session.requests.load(Ordering::Relaxed) < 10 {
        session.requests.fetch_add(1, Ordering::Relaxed);
        sleep(Duration::from_millis(1)).await;
    }
}

async fn run() -> Result<(), Box<dyn Error>> {
    let server = Arc::new(Server::default());
    let (mut tasks, mut ids) = (JoinSet::new(), Vec::new());
    for user in 0..SESSIONS {
        // In the accept loop, not in the task: after the loop has ended, no session is added.
        let session = Session { user, requests: AtomicU64::new(0) };
        let session = server.sessions.insert_ref(session).map_err(|error| error.reason)?;
        ids.push(CtxRef::id(&session));
        let server = Arc::clone(&server);
        tasks.spawn(async move {
            match user {
                99 => std::future::pending().await, // stuck, with its reference
                _ => server.serve(session).await,
            }
        });
    }
    sleep(Duration::from_millis(50)).await;
    server.end(ids[2], "kicked"); // the command of an administrator names the id
    server.end(ids[2], "kicked");
    let in_time = server.shut_down().await;
    tasks.abort_all(); // drops the references of stuck sessions
    while tasks.join_next().await.is_some() {}

    let mut ended = server.ended.lock().unwrap().clone();
    let count = |reason| ended.iter().filter(|(_, why)| *why == reason).count();
    let (left, kicked, rest) = (count("left"), count("kicked"), count("shutdown"));
    println!(
        "{SESSIONS} sessions ended once: {left} left, {kicked} kicked, {rest} at the shutdown"
    );
    ended.sort_unstable();
    assert!(ended.iter().map(|(user, _)| *user).eq(0..SESSIONS));
    assert!(!in_time && kicked == 1 && server.sessions.is_empty());
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    Builder::new_multi_thread().worker_threads(2).enable_time().build()?.block_on(run())
}
