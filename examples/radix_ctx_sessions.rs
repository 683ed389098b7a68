//! Find sessions by ids that clients bring, some of which are of sessions that ended long ago.
//!
//! Run:     cargo run -p examples --example radix_ctx_sessions
//! Prints:  8000 logins, 80000 requests served, 16000 stale ids

use std::thread;

use radix_ctx::{CtxTable, Id, LookupError};

const CLIENTS: u64 = 4;
const LOGINS: u64 = 2_000; // per client
const REQUESTS: u64 = 10; // per login

/// Returns the user of a cookie: a lookup that takes no lock and never waits.
fn user_of(sessions: &CtxTable<u64>, cookie: u64) -> Result<u64, LookupError> {
    let id = Id::from_bits(cookie).ok_or(LookupError::NotFound)?; // any number may come
    sessions.with(id, |user| *user)
}

fn main() {
    let sessions = CtxTable::builder().max_contexts(CLIENTS).build();
    thread::scope(|s| {
        for user in 0..CLIENTS {
            let sessions = &sessions;
            s.spawn(move || {
                let mut first = None;
                for _ in 0..LOGINS {
                    let id = sessions.insert(user).expect("one session for each client");
                    let cookie = id.to_bits(); // all that a client keeps
                    for _ in 0..REQUESTS {
                        assert_eq!(user_of(sessions, cookie), Ok(user));
                    }
                    sessions.remove(id).expect("only this thread removes it");
                    assert_eq!(user_of(sessions, cookie), Err(LookupError::Stale));
                    // The index of the first session is used again and again, its id never.
                    let first = *first.get_or_insert(cookie);
                    assert_eq!(user_of(sessions, first), Err(LookupError::Stale));
                }
            });
        }
    });

    let (logins, stats) = (CLIENTS * LOGINS, sessions.stats());
    println!("{logins} logins, {} requests served, {} stale ids", logins * REQUESTS, logins * 2);
    assert!(stats.live == 0 && stats.slabs * 64 < logins, "{stats}");
}
