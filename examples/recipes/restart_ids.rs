//! Ids that clients keep while the server restarts: see `restart_ids.md`.
//!
//! Run:     cargo run -p examples --example restart_ids
//! Prints:  the cookie of the first run is refused in the second; the token finds alice again

use std::collections::HashMap;
use std::error::Error;
use std::fs;
use std::io::Read;
use std::path::Path;

use radix_ctx::{CtxTable, Id};

/// The number that a client brings back: the run of the server, and an id of that run.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Cookie {
    run: u64,
    id: u64,
}

struct Session {
    user: String,
}

struct Server {
    /// Differs in each run, so that no cookie of another run is looked up.
    run: u64,
    sessions: CtxTable<Session>,
    /// The names that outlive a run, and the ids that stand for them in this one.
    by_token: HashMap<String, Id>,
}

impl Server {
    /// Starts a run: makes the sessions that were saved, with new ids.
    fn start(saved: &Path) -> Result<Self, Box<dyn Error>> {
        let mut run = [0; 8];
        fs::File::open("/dev/urandom")?.read_exact(&mut run)?;
        let mut server = Self {
            run: u64::from_ne_bytes(run),
            sessions: CtxTable::new(),
            by_token: HashMap::new(),
        };
        for line in fs::read_to_string(saved).unwrap_or_default().lines() {
            let (token, user) = line.split_once(' ').ok_or("a line without a user")?;
            server.log_in(token, user)?;
        }
        Ok(server)
    }

    fn log_in(&mut self, token: &str, user: &str) -> Result<Cookie, Box<dyn Error>> {
        let session = Session { user: user.to_string() };
        let id = self.sessions.insert(session).map_err(|error| error.reason)?;
        self.by_token.insert(token.to_string(), id);
        Ok(self.cookie(id))
    }

    fn cookie(&self, id: Id) -> Cookie {
        Cookie { run: self.run, id: id.to_bits() }
    }

    /// The fast path of each request: takes no lock.
    fn user_of(&self, cookie: Cookie) -> Option<String> {
        let id = Id::from_bits(cookie.id).filter(|_| cookie.run == self.run)?;
        self.sessions.with(id, |session| session.user.clone()).ok()
    }

    /// The slow path after a restart: a new cookie for a token, once for each client.
    fn resume(&self, token: &str) -> Option<Cookie> {
        self.by_token.get(token).map(|id| self.cookie(*id))
    }

    /// Ends the run. Saves the tokens, and no id.
    fn stop(self, saved: &Path) -> Result<(), Box<dyn Error>> {
        let mut lines = String::new();
        for (token, id) in &self.by_token {
            self.sessions.with(*id, |session| lines += &format!("{token} {}\n", session.user))?;
        }
        Ok(fs::write(saved, lines)?)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let saved = folder.path().join("sessions");
    let mut server = Server::start(&saved)?;
    let old = server.log_in("token-a", "alice")?;
    assert_eq!(server.user_of(old).as_deref(), Some("alice"));
    server.stop(&saved)?;

    // Another user comes first after the restart: the number of the id is the same.
    fs::write(&saved, format!("token-b bob\n{}", fs::read_to_string(&saved)?))?;
    let server = Server::start(&saved)?;
    let bob = server.resume("token-b").ok_or("no bob")?;
    assert_eq!(bob.id, old.id);
    assert_eq!(server.user_of(old), None, "without the run, alice would be bob");
    let new = server.resume("token-a").ok_or("no alice")?;
    assert_eq!(server.user_of(new).as_deref(), Some("alice"));
    println!("the cookie of the first run is refused in the second; the token finds alice again");
    Ok(())
}
