//! TLS on a connection's socket, non-blocking. Only with the cargo feature `tls`.
//!
//! The certificates lie in a folder under the names that QEMU and nbdkit use: `server-cert.pem`,
//! `server-key.pem`, and `ca-cert.pem` of the authority that signs the certificates of clients. A
//! `ca-crl.pem` beside it lists the revoked ones.

use std::io::{self, Read, Write};

use nbd_protocol::TlsPolicy;
use socket2::Socket;

use crate::args::Args;

/// The TLS session of a connection.
pub(crate) trait Tls {
    /// Whether there are decrypted bytes, or an end behind them, that no event of the socket
    /// tells of.
    fn has_plaintext(&self) -> bool;

    /// Whether bytes wait for the socket.
    fn holds_output(&self) -> bool;

    /// Says that nothing more is sent.
    fn close(&mut self);

    /// Fills as much of `buf` as has arrived; 0 at the end of the input.
    fn read(&mut self, socket: &Socket, buf: &mut [u8]) -> io::Result<usize>;

    /// Encrypts, and sends, until the socket takes no more. Returns how many bytes it took over;
    /// those not sent leave with the next flush.
    fn write(&mut self, socket: &Socket, pieces: &[io::IoSlice<'_>]) -> io::Result<usize>;

    /// Sends what waits for the socket; fails with `WouldBlock` if it does not take all of it.
    fn flush(&mut self, socket: &Socket) -> io::Result<()>;
}

/// What the server offers its clients.
#[derive(Debug, Default)]
pub(crate) struct Acceptor {
    pub(crate) policy: TlsPolicy,
    #[cfg(feature = "tls")]
    config: Option<std::sync::Arc<rustls::ServerConfig>>,
}

/// A connection's socket, and TLS over it once that was started.
pub(crate) struct Wire<'a> {
    pub(crate) socket: &'a Socket,
    pub(crate) tls: Option<&'a mut (dyn Tls + 'static)>,
}

impl Read for Wire<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let mut socket = self.socket;
        match &mut self.tls {
            None => socket.read(buf),
            Some(tls) => tls.read(socket, buf),
        }
    }

    fn read_vectored(&mut self, bufs: &mut [io::IoSliceMut<'_>]) -> io::Result<usize> {
        let mut socket = self.socket;
        match (&mut self.tls, bufs) {
            (None, bufs) => socket.read_vectored(bufs),
            (Some(tls), [first, ..]) => tls.read(socket, first),
            (Some(_), []) => Ok(0),
        }
    }
}

impl Write for Wire<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[io::IoSlice::new(buf)])
    }

    fn write_vectored(&mut self, pieces: &[io::IoSlice<'_>]) -> io::Result<usize> {
        let mut socket = self.socket;
        match &mut self.tls {
            None => socket.write_vectored(pieces),
            Some(tls) => tls.write(socket, pieces),
        }
    }

    /// Sends what TLS holds back; fails with `WouldBlock` if the socket does not take all of it.
    fn flush(&mut self) -> io::Result<()> {
        self.tls.as_mut().map_or(Ok(()), |tls| tls.flush(self.socket))
    }
}

impl Acceptor {
    /// Reads the certificates that the command line names.
    ///
    /// # Errors
    ///
    /// Says which file is missing or malformed, or which option.
    pub(crate) fn new(args: &Args) -> Result<Self, String> {
        match (args.tls, &args.tls_certificates) {
            (TlsPolicy::Off, None) => Ok(Self::default()),
            (TlsPolicy::Off, Some(_)) => Err("--tls-certificates needs --tls on or require".into()),
            _ => Self::open(args),
        }
    }
}

#[cfg(feature = "tls")]
mod with_rustls {
    use std::fmt;
    use std::io::{ErrorKind, IoSlice};
    use std::path::Path;
    use std::sync::Arc;

    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
    use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
    use rustls::{RootCertStore, ServerConfig, ServerConnection};
    use socket2::Socket;
    use tracing::warn;

    use super::{Acceptor, Args, Read, Tls, Write, io};

    /// Bytes that TLS holds back while the socket takes none.
    const HELD: usize = 64 << 10;
    /// Memory of a session beside them: its keys, and records that have not arrived whole. A guess.
    const SESSION: usize = 64 << 10;
    /// Bytes received in one read. Records without data make no progress, so a client could keep a
    /// worker there. A guess: twice what is read at once without TLS.
    const BUDGET: usize = 512 << 10;

    impl Acceptor {
        pub(super) fn open(args: &Args) -> Result<Self, String> {
            let Some(dir) = &args.tls_certificates else {
                return Err("--tls needs --tls-certificates".into());
            };
            let config = Some(Arc::new(config(dir, !args.tls_no_verify_peer)?));
            Ok(Self { policy: args.tls, config })
        }

        /// Memory that a session may take.
        pub(crate) fn room(&self) -> usize {
            self.config.as_ref().map_or(0, |_| HELD + SESSION)
        }

        /// Starts TLS: the client speaks next.
        pub(crate) fn accept(&self) -> io::Result<Box<dyn Tls>> {
            let config = self.config.clone().ok_or(ErrorKind::Unsupported)?;
            let mut session = ServerConnection::new(config).map_err(io::Error::other)?;
            session.set_buffer_limit(Some(HELD));
            Ok(Box::new(Rustls { session, plaintext: 0, ended: None }))
        }
    }

    fn config(dir: &Path, verify_peer: bool) -> Result<ServerConfig, String> {
        let file = |name: &str| dir.join(name);
        let fail =
            |name: &str, error: &dyn fmt::Display| format!("{}: {error}", file(name).display());
        let certificates = |name: &str| {
            let all = CertificateDer::pem_file_iter(file(name)).map_err(|e| fail(name, &e))?;
            let all: Vec<_> = all.collect::<Result<_, _>>().map_err(|e| fail(name, &e))?;
            if all.is_empty() { Err(fail(name, &"it holds no certificate")) } else { Ok(all) }
        };
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|e| e.to_string())?;
        let (ca, crl, cert, key) =
            ("ca-cert.pem", "ca-crl.pem", "server-cert.pem", "server-key.pem");
        let builder = if verify_peer {
            let mut roots = RootCertStore::empty();
            let hint = |error| {
                format!("{error} (--tls-no-verify-peer admits clients without a certificate)")
            };
            for certificate in certificates(ca).map_err(hint)? {
                roots.add(certificate).map_err(|e| fail(ca, &e))?;
            }
            let mut verifier =
                WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            // Only a name that is not there means no list: a dangling link is an error.
            let there = file(crl).symlink_metadata();
            if there.is_ok() || there.is_err_and(|e| e.kind() != ErrorKind::NotFound) {
                let lists = CertificateRevocationListDer::pem_file_iter(file(crl))
                    .and_then(|lists| lists.collect::<Result<Vec<_>, _>>())
                    .map_err(|e| fail(crl, &e))?;
                if lists.is_empty() {
                    return Err(fail(crl, &"it holds no revocation list"));
                }
                verifier = verifier.with_crls(lists).allow_unknown_revocation_status();
            }
            builder.with_client_cert_verifier(verifier.build().map_err(|e| fail(ca, &e))?)
        } else {
            warn!("--tls-no-verify-peer: every client that reaches the server is admitted");
            builder.with_no_client_auth()
        };
        let chain = certificates(cert)?;
        let secret = PrivateKeyDer::from_pem_file(file(key)).map_err(|e| fail(key, &e))?;
        let mut config = builder.with_single_cert(chain, secret).map_err(|e| fail(cert, &e))?;
        // A session that resumes is not verified again, and connections last long.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(config)
    }

    fn is_transient(error: &io::Error) -> bool {
        matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
    }

    struct Rustls {
        session: ServerConnection,
        /// Bytes that were decrypted and not read.
        plaintext: usize,
        /// How the input ended, behind plaintext that was not read yet.
        ended: Option<io::Result<()>>,
    }

    impl Tls for Rustls {
        fn has_plaintext(&self) -> bool {
            self.plaintext > 0 || self.ended.is_some()
        }

        fn holds_output(&self) -> bool {
            self.session.wants_write()
        }

        fn close(&mut self) {
            self.session.send_close_notify();
        }

        fn read(&mut self, socket: &Socket, buf: &mut [u8]) -> io::Result<usize> {
            let (mut filled, mut budget) = (0, BUDGET);
            while filled < buf.len() {
                match self.session.reader().read(&mut buf[filled..]) {
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        if self.ended.is_some() {
                            break;
                        }
                        let received = match budget {
                            0 => Err(ErrorKind::WouldBlock.into()), // epoll tells again of the rest
                            _ => self.receive(socket),
                        };
                        match received {
                            Err(error) if is_transient(&error) => match filled {
                                0 => return Err(error),
                                _ => break, // it is said again next time
                            },
                            // What was decrypted in front of the error is read first.
                            Err(error) => self.ended = Some(Err(error)),
                            Ok(count) => budget = budget.saturating_sub(count),
                        }
                    }
                    Err(error) if error.kind() != ErrorKind::UnexpectedEof => return Err(error),
                    // UnexpectedEof is the end without a goodbye. A request that it cuts off is not
                    // carried out.
                    Ok(0) | Err(_) => {
                        self.ended.get_or_insert(Ok(()));
                        break;
                    }
                    Ok(count) => {
                        filled += count;
                        self.plaintext = self.plaintext.saturating_sub(count);
                    }
                }
            }
            match self.ended.take_if(|_| filled == 0) {
                Some(Err(error)) => Err(error),
                _ => Ok(filled),
            }
        }

        /// Sends whenever [`HELD`] bytes are encrypted.
        fn write(&mut self, socket: &Socket, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
            // Of the first of `rest`, `skip` bytes were taken over.
            let (mut taken, mut rest, mut skip) = (0, pieces, 0);
            loop {
                while rest.first().is_some_and(|first| skip >= first.len()) {
                    skip -= rest[0].len();
                    rest = &rest[1..];
                }
                let Some(first) = rest.first() else { return Ok(taken) };
                let count = match skip {
                    0 => self.session.writer().write_vectored(rest)?,
                    _ => self.session.writer().write(&first[skip..])?,
                };
                (taken, skip) = (taken + count, skip + count);
                if count > 0 {
                    continue;
                }
                if !self.holds_output() {
                    return Err(ErrorKind::WriteZero.into()); // it takes no more, whatever is sent
                }
                match self.flush(socket) {
                    Err(error) if error.kind() == ErrorKind::WouldBlock && taken > 0 => {
                        return Ok(taken);
                    }
                    flushed => flushed?,
                }
            }
        }

        fn flush(&mut self, mut socket: &Socket) -> io::Result<()> {
            while self.session.wants_write() {
                match self.session.write_tls(&mut socket) {
                    Ok(0) => return Err(ErrorKind::WriteZero.into()),
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    other => drop(other?),
                }
            }
            Ok(())
        }
    }

    impl Rustls {
        /// Receives and decrypts once; returns the bytes received. What the handshake answers is
        /// sent at once; what the socket does not take of that is sent with the next flush.
        fn receive(&mut self, mut socket: &Socket) -> io::Result<usize> {
            let count = self.session.read_tls(&mut socket)?;
            let state = self.session.process_new_packets();
            let sent = self.flush(socket); // also the alert, if there is one
            self.plaintext = state.map_err(io::Error::other)?.plaintext_bytes_to_read();
            match sent {
                Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error),
                _ => Ok(count),
            }
        }
    }
}

#[cfg(not(feature = "tls"))]
#[expect(clippy::unused_self, reason = "those with TLS need it")]
impl Acceptor {
    fn open(_: &Args) -> Result<Self, String> {
        Err("this nbd_server was built without TLS: build it with --features tls".into())
    }

    pub(crate) fn room(&self) -> usize {
        0
    }

    pub(crate) fn accept(&self) -> io::Result<Box<dyn Tls>> {
        Err(io::ErrorKind::Unsupported.into())
    }
}
