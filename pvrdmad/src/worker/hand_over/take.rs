//! The taker's side of a hand-over.

use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, ensure};
use log::error;
use pvrdma_pci_function::Migratable;
use pvrdma_vfio_user_server::{AdoptedClient, ClientConnection, Endpoint, Server};

use super::wire::{Answer, GO, Go, PATIENCE, Part, get, get_connection, get_pages};
use crate::config::{Device, LinkState};
use crate::doorbells::{ArrivingPages, DoorbellSetup, ServedFile};
use crate::fault_point;
use crate::protocol::exchange::put;
use crate::status::FormerCounts;

/// A device that arrives with the hand-over: its configuration and descriptors, as in
/// [`Request::Serve`](crate::protocol::Request::Serve).
#[derive(Debug)]
pub(crate) struct Expected {
    pub(crate) device: Device,
    pub(crate) link: LinkState,
    pub(crate) doorbells: DoorbellSetup,
    /// A worker that has crashed has left its clients with the keeper.
    pub(crate) kept: bool,
    pub(crate) fds: Vec<OwnedFd>,
}

/// Functions that have arrived so far.
pub(crate) struct Arrivals {
    from: UnixStream,
    functions: Vec<(String, Arc<dyn Migratable>)>,
    clients: Vec<AdoptedClient>,
    pages: Vec<ArrivingPages>,
    /// Client of the function that arrived last.
    connection: Option<ClientConnection>,
    /// Counters of the function that arrived last.
    counts: FormerCounts,
}

impl Arrivals {
    /// Receives functions from the giver at the other end of a socket.
    ///
    /// # Errors
    /// The socket fails.
    pub(crate) fn from(giver: UnixStream) -> Result<Self> {
        giver.set_read_timeout(Some(PATIENCE))?;
        giver.set_write_timeout(Some(PATIENCE))?;
        Ok(Self {
            from: giver,
            functions: Vec::new(),
            clients: Vec::new(),
            pages: Vec::new(),
            connection: None,
            counts: FormerCounts::default(),
        })
    }

    /// Receives the next function, which must be this one, up to its state. Returns its doorbell pages, if its
    /// doorbells do not trap, and `true` if a client has touched one.
    ///
    /// # Errors
    /// Another function arrives, or its client or its pages are refused.
    pub(crate) fn receive(&mut self, (device, nic): (&str, bool)) -> Result<Option<(DoorbellSetup, ServedFile, bool)>> {
        let part = get(&self.from)?.context("the other worker ended")?;
        fault_point::reach("worker-function");
        let Part::Function { device: name, nic: arrives, client, doorbells, counts } = part else {
            return Err(anyhow!("the other worker does not have the device"));
        };
        ensure!(name == device && arrives == nic, "the other worker sends another device, {name}");
        ensure!(!counts.is_too_long(), "the other worker sends more counters than a device has");
        self.counts = counts;
        self.connection = client.map(|client| get_connection(&self.from, client)).transpose()?;
        fault_point::reach("worker-client");
        doorbells.map(|pages| get_pages(&self.from, pages)).transpose()
    }

    /// Receives the state of the function that [`Self::receive`] has announced. Once [`Self::start`] is called, the
    /// function is served at `listener`.
    ///
    /// # Errors
    /// The state or the client is refused.
    pub(crate) fn serve(
        &mut self,
        device: &str,
        function: Arc<dyn Migratable>,
        listener: UnixListener,
        endpoint: Endpoint,
    ) -> Result<Server> {
        function.restore_with_network(&mut &self.from).map_err(anyhow::Error::from_boxed)?;
        fault_point::reach("worker-restored");
        self.functions.push((device.to_owned(), function));
        let Some(connection) = self.connection.take() else { return Ok(Server::start(listener, endpoint)?) };
        let (server, client) = Server::adopt(listener, endpoint, connection)?;
        self.clients.push(client);
        Ok(server)
    }

    /// Adds doorbell pages, which are served once [`Self::start`] is called.
    pub(crate) fn add_pages(&mut self, pages: Option<ArrivingPages>) {
        self.pages.extend(pages);
    }

    /// Takes the counters of the function that has arrived last.
    pub(crate) fn take_counts(&mut self) -> FormerCounts {
        std::mem::take(&mut self.counts)
    }

    /// Tells the giver that everything has arrived, waits for its permission, and starts to serve.
    ///
    /// # Errors
    /// The giver has more devices, or keeps them.
    pub(crate) fn start(self) -> Result<()> {
        let Self { from, functions, clients, pages, connection: _, counts: _ } = self;
        let end = get(&from)?.context("the other worker ended")?;
        ensure!(matches!(end, Part::End {}), "the other worker has another device");
        fault_point::reach("worker-ready");
        from.set_read_timeout(Some(GO))?;
        put(&from, &Answer::Ready {})?;
        // A giver that has timed out hangs up and serves its clients again, so the end of the stream is no permission.
        let Go {} = get(&from)?.context("the other worker keeps its devices")?;
        pages.into_iter().for_each(ArrivingPages::serve);
        for (device, function) in functions {
            if let Err(problem) = function.resume() {
                // The function is as after a reset, and its driver can be loaded again. Log: once for each function of
                // a hand-over.
                error!("{device}: cannot resume: {problem}");
            }
        }
        clients.into_iter().for_each(AdoptedClient::serve);
        Ok(())
    }

    /// Tells the giver that it keeps its devices.
    pub(crate) fn refuse(self, reason: &anyhow::Error) {
        let Self { from, functions: _, clients, pages, connection: _, counts: _ } = self;
        drop((clients, pages));
        // A giver that has ended needs no reason.
        let _ = put(&from, &Answer::Refused { reason: format!("{reason:#}") });
    }
}
