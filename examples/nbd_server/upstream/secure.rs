//! TLS of a connection to the upstream. Needs the cargo feature `tls`.

#[cfg(feature = "tls")]
pub(super) use with_rustls::Secure;
#[cfg(not(feature = "tls"))]
pub(super) use without::Secure;

#[cfg(feature = "tls")]
mod with_rustls {
    use std::fmt;
    use std::io::{self, ErrorKind, Read, Write};
    use std::sync::Arc;

    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
    use rustls::{ClientConfig, ClientConnection, RootCertStore};
    use socket2::Socket;

    use super::super::address::TlsOptions;

    /// The TLS session of a connection.
    pub(in super::super) struct Secure(Box<ClientConnection>);

    impl Secure {
        /// Performs the TLS handshake. Blocks if the socket does.
        pub(in super::super) fn start(socket: &Socket, tls: &TlsOptions) -> Result<Self, String> {
            let name = ServerName::try_from(tls.host.clone()).map_err(|e| e.to_string())?;
            let session = ClientConnection::new(Arc::new(config(tls)?), name);
            let mut session = session.map_err(|e| e.to_string())?;
            let mut socket = socket;
            while session.is_handshaking() {
                session.complete_io(&mut socket).map_err(|e| e.to_string())?;
            }
            Ok(Self(Box::new(session)))
        }

        pub(in super::super) fn holds_output(&self) -> bool {
            self.0.wants_write()
        }

        pub(in super::super) fn read(
            &mut self,
            mut socket: &Socket,
            buf: &mut [u8],
        ) -> io::Result<usize> {
            loop {
                match self.0.reader().read(buf) {
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    // The connection ended without a close_notify. A reply that it cuts off is
                    // treated as lost.
                    Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(0),
                    result => return result,
                }
                self.0.read_tls(&mut socket)?;
                let state = self.0.process_new_packets();
                match self.flush(socket) {
                    Err(error) if error.kind() != ErrorKind::WouldBlock => return Err(error),
                    _ => state.map_err(io::Error::other)?,
                };
            }
        }

        pub(in super::super) fn write(&mut self, socket: &Socket, buf: &[u8]) -> io::Result<usize> {
            self.flush(socket)?; // so that the session buffers at most one piece
            let count = self.0.writer().write(buf)?;
            match self.flush(socket) {
                Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error),
                _ => Ok(count),
            }
        }

        pub(in super::super) fn flush(&mut self, mut socket: &Socket) -> io::Result<()> {
            while self.0.wants_write() {
                self.0.write_tls(&mut socket)?;
            }
            Ok(())
        }
    }

    fn config(tls: &TlsOptions) -> Result<ClientConfig, String> {
        let file = |name: &str| tls.certificates.join(name);
        let fail =
            |name: &str, error: &dyn fmt::Display| format!("{}: {error}", file(name).display());
        let certificates = |name: &str| {
            let all = CertificateDer::pem_file_iter(file(name)).map_err(|e| fail(name, &e))?;
            all.collect::<Result<Vec<_>, _>>().map_err(|e| fail(name, &e))
        };
        let (ca, cert, key) = ("ca-cert.pem", "client-cert.pem", "client-key.pem");
        let mut roots = RootCertStore::empty();
        for certificate in certificates(ca)? {
            roots.add(certificate).map_err(|e| fail(ca, &e))?;
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|e| e.to_string())?
            .with_root_certificates(roots);
        if !file(cert).exists() {
            return Ok(builder.with_no_client_auth());
        }
        let secret = PrivateKeyDer::from_pem_file(file(key)).map_err(|e| fail(key, &e))?;
        builder.with_client_auth_cert(certificates(cert)?, secret).map_err(|e| fail(cert, &e))
    }
}

#[cfg(not(feature = "tls"))]
mod without {
    use std::io;

    use socket2::Socket;

    use super::super::address::TlsOptions;

    /// An uninhabited type: there is no TLS session without the feature.
    pub(in super::super) enum Secure {}

    impl Secure {
        pub(in super::super) fn start(_: &Socket, _: &TlsOptions) -> Result<Self, String> {
            Err("this program was built without TLS: build it with --features tls".into())
        }

        pub(in super::super) fn holds_output(&self) -> bool {
            match *self {}
        }

        pub(in super::super) fn read(&mut self, _: &Socket, _: &mut [u8]) -> io::Result<usize> {
            match *self {}
        }

        pub(in super::super) fn write(&mut self, _: &Socket, _: &[u8]) -> io::Result<usize> {
            match *self {}
        }

        pub(in super::super) fn flush(&mut self, _: &Socket) -> io::Result<()> {
            match *self {}
        }
    }
}
