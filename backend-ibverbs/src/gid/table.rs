//! GID table of a guest.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use pvrdma_base::DeviceLog;
use pvrdma_packet::MacAddr;
use pvrdma_verbs::{DeviceContext, OtherAddresses, VerbsError};
use pvrdma_verbs_types::{Gid, GidType};

use super::fabric::{Bound, Member};
use super::host::HostGid;
use super::ip::{ip, is_confined};
use crate::addresses::{AddedAddress, MAX_ADDRESSES};
use crate::counters::bump;
use crate::shared::Shared;

const ENTRIES: usize = 256;

/// GIDs that a guest has bound, by index, and the host's addresses that exist because of them.
#[derive(Debug)]
pub(crate) struct GidTable {
    log: Arc<DeviceLog>,
    shared: Arc<Shared>,
    member: Arc<Member>,
    /// GIDs reserved for the device by its rules.
    reserved: Vec<Gid>,
    /// The device may bind other GIDs as well.
    others: OtherAddresses,
    entries: RwLock<Box<[Option<Bound>]>>,
    /// Addresses on the host's interface that were added for this device.
    added: Mutex<HashMap<Gid, AddedAddress>>,
}

impl GidTable {
    pub(crate) fn new(mac: MacAddr, context: &DeviceContext, shared: Arc<Shared>, member: Arc<Member>) -> Self {
        let entries = RwLock::new(vec![None; ENTRIES].into_boxed_slice());
        let rule = &context.rules.addresses;
        let (reserved, others) = (rule.reserved(mac).collect(), rule.others);
        Self { log: Arc::clone(&context.log), shared, member, reserved, others, entries, added: Mutex::default() }
    }

    /// Returns the GID bound at an index.
    pub(crate) fn get(&self, index: u8) -> Option<Bound> {
        self.entries.read().get(usize::from(index)).copied().flatten()
    }

    /// Returns the GIDs whose addresses the host has for the device: on RoCE, those in the host's table. On other ports
    /// that table has no IP addresses, and the GIDs are those that are listed for the device.
    pub(crate) fn own_addresses(&self) -> Vec<Bound> {
        let entries = self.entries.read();
        let mut found: Vec<Bound> = entries.iter().flatten().filter(|bound| self.is_own(bound)).copied().collect();
        // RoCE v1 and v2 have an entry each.
        found.sort_by_key(|bound| bound.gid.0);
        found.dedup_by_key(|bound| bound.gid);
        found
    }

    /// Returns the host's address by which peers see connections of the guest from this address, or `None` if the
    /// host's routes choose one.
    pub(crate) fn host_source(&self, bound: &Bound) -> Option<IpAddr> {
        let gid = if self.is_own(bound) { bound.gid } else { bound.host.gid };
        let known = self.is_own(bound) || self.shared.transport.has_ip_gids();
        known.then(|| ip(gid)).filter(|ip| !is_confined(*ip))
    }

    fn is_own(&self, bound: &Bound) -> bool {
        if self.shared.transport.has_ip_gids() { bound.is_own() } else { self.reserved.contains(&bound.gid) }
    }

    /// Binds a GID at an index, with the host's own entry for it if that exists or can be added.
    ///
    /// # Errors
    /// [`VerbsError::InUse`]: another device of this process has the GID. [`VerbsError::NotAllowed`]: the device may
    /// not have it.
    pub(crate) fn bind(&self, index: u8, gid: Gid, kind: GidType) -> Result<(), VerbsError> {
        let shared = &self.shared;
        let found = shared.gids.find(gid, kind);
        self.check(gid, found.is_some()).inspect_err(|error| {
            bump(&self.member.counters.gids_refused);
            self.log.warn(module_path!(), format_args!("the guest may not bind {gid}: {error}"));
        })?;
        let host = found.unwrap_or(shared.default_gid);
        let bound = Bound { gid, kind, host };
        // This must precede changes of the host, because another guest may have the address.
        shared.fabric.bind(&self.member, bound)?;
        self.replace(index, Some(bound));
        if found.is_some() {
            return Ok(());
        }
        match self.add_to_host(gid, kind) {
            Some(host) => {
                let bound = Bound { gid, kind, host };
                shared.fabric.bind(&self.member, bound)?;
                self.replace(index, Some(bound));
            }
            None => log::debug!("{}: the host does not have {gid}, {} stands for it", self.log.name(), host.gid),
        }
        Ok(())
    }

    /// Checks that the device may bind a GID, which may also be an address of the host.
    fn check(&self, gid: Gid, host_has_it: bool) -> Result<(), VerbsError> {
        if self.reserved.contains(&gid) {
            Ok(())
        } else if self.others == OtherAddresses::Refuse {
            Err(VerbsError::NotAllowed("the address is not listed for the device"))
        } else if host_has_it && !self.shared.given.contains(gid) {
            Err(VerbsError::NotAllowed("the address is the host's own, and not listed for the device"))
        } else {
            Ok(())
        }
    }

    /// Adds a guest's address to the host's interface, if enabled. Returns the resulting entry of the host's table.
    fn add_to_host(&self, gid: Gid, kind: GidType) -> Option<HostGid> {
        let addresses = self.shared.addresses.as_ref()?;
        let counters = &self.member.counters;
        let mut added = self.added.lock();
        if !added.contains_key(&gid) {
            let address = if added.len() < MAX_ADDRESSES { AddedAddress::add(addresses, gid) } else { None };
            let Some(address) = address else {
                bump(&counters.addresses_refused);
                return None;
            };
            self.shared.given.insert(gid);
            added.insert(gid, address);
            bump(&counters.addresses_added);
        }
        let host = self.shared.gids.await_new(gid, kind);
        if host.is_none() {
            self.log.warn(
                module_path!(),
                format_args!("{gid} was added to the host's interface and is not among the adapter's GIDs"),
            );
            added.remove(&gid);
        }
        host
    }

    /// Unbinds the GID at an index.
    pub(crate) fn unbind(&self, index: u8) {
        self.replace(index, None);
    }

    /// Unbinds all GIDs.
    pub(crate) fn clear(&self) {
        for index in 0..=u8::MAX {
            self.unbind(index);
        }
    }

    fn replace(&self, index: u8, new: Option<Bound>) {
        let mut entries = self.entries.write();
        let Some(slot) = entries.get_mut(usize::from(index)) else { return };
        let old = std::mem::replace(slot, new);
        if let Some(old) = old
            && !entries.iter().flatten().any(|bound| bound.gid == old.gid)
        {
            self.shared.fabric.unbind(&self.member, old.gid);
            self.added.lock().remove(&old.gid);
        }
    }
}
