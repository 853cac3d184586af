//! All parts of a machine: collected when it has stopped, and restored in a new one before it runs.

use std::io::{Read, Write};
use std::sync::PoisonError;

use anyhow::{Context, Error, Result, bail, ensure};
use kvm_ioctls::Kvm;
use pvrdma_guest_memory::MemoryBudget;
use pvrdma_pci_function::CONFIG_SIZE;
use pvrdma_pci_slot::{ConfigPorts, Message, SavedVector, Slot as BusSlot};
use vm_device::DevicePio;
use vm_device::bus::PioAddress;
use vm_memory::GuestMemoryMmap;

use super::frames::{Kind, Receiver, Sender, decode};
use super::messages::{Controllers, DiskRegisters, Hello, Ports, Processor, Slot, Vector};
use super::{controllers, pages, processor};
use crate::memory::{Vcpu, Vm};
use crate::parts::Parts;

/// Maximum number of slots in a stream.
const MAX_SLOTS: usize = 32;
/// Maximum number of bytes of a function's state: the default of a device's own limit.
const MAX_FUNCTION: u64 = MemoryBudget::DEFAULT_LIMIT;
/// Address register of the bus.
const PCI_ADDRESS: PioAddress = PioAddress(0xcf8);

/// State of a machine, without its memory.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct State {
    processors: Vec<Processor>,
    controllers: Controllers,
    pub(crate) ports: Ports,
    slots: Vec<Slot>,
    network: Vec<u8>,
    rdma: Vec<u8>,
}

impl State {
    /// Pauses the functions and collects the state. The processors have stopped. The functions stay paused, also after
    /// an error.
    pub(crate) fn collect(kvm: &Kvm, vm: &Vm, cpus: &[Vcpu], parts: &Parts) -> Result<Self> {
        let functions = parts.functions();
        functions.iter().for_each(|(_, function)| function.pause());
        let [network, rdma] = functions.map(|(name, function)| {
            let mut state = Vec::new();
            function.save(&mut state).map(|()| state).map_err(Error::from_boxed).context(name)
        });
        // Disks interrupt the guest for their last requests, so the interrupt controllers come later.
        let disks = parts.disks.iter().map(|disk| disk.save()).collect::<Result<Vec<_>>>()?;
        let processors = cpus.iter().map(|cpu| processor::save(kvm, cpu)).collect::<Result<_>>()?;
        let controllers = controllers::save(vm.fd())?;
        Ok(Self {
            processors,
            controllers,
            ports: ports(parts),
            slots: slots(parts, &disks)?,
            network: network?,
            rdma: rdma?,
        })
    }

    /// Sends the state.
    pub(crate) fn send(&self, to: &mut Sender<impl Write>) -> Result<()> {
        let Self { processors, controllers, ports, slots, network, rdma } = self;
        processors.iter().try_for_each(|cpu| to.message(Kind::Processor, cpu))?;
        to.message(Kind::Controllers, controllers)?;
        to.message(Kind::Ports, ports)?;
        slots.iter().try_for_each(|slot| to.message(Kind::Slot, slot))?;
        to.bytes(Kind::Network, network)?;
        to.bytes(Kind::Rdma, rdma)
    }

    /// Reads memory and state to the end of the stream.
    ///
    /// # Errors
    /// The stream is malformed, or has more than a machine has.
    pub(crate) fn receive(hello: &Hello, from: &mut Receiver<impl Read>, memory: &GuestMemoryMmap) -> Result<Self> {
        let mut state = Self::default();
        loop {
            let (kind, body) = from.next()?;
            match kind {
                Kind::Hello => bail!("the state has two beginnings"),
                Kind::Pages => pages::receive(memory, body)?,
                Kind::Processor => state.processors.push(decode(kind, body)?),
                Kind::Controllers => state.controllers = decode(kind, body)?,
                Kind::Ports => state.ports = decode(kind, body)?,
                Kind::Slot => state.slots.push(decode(kind, body)?),
                Kind::Network => append(&mut state.network, body)?,
                Kind::Rdma => append(&mut state.rdma, body)?,
                Kind::End => break,
                other => bail!("the state has a frame {other:?}"),
            }
            let processors = state.processors.len();
            ensure!(processors as u64 <= u64::from(hello.cpus), "the state has {processors} processors");
            ensure!(state.slots.len() <= MAX_SLOTS, "the state has {} slots", state.slots.len());
        }
        let processors = state.processors.len();
        ensure!(processors as u64 == u64::from(hello.cpus), "the state has {processors} processors");
        Ok(state)
    }

    /// Restores a machine that has never run. Its functions are paused afterwards, see [`Parts::resume`]. The serial
    /// ports were created from the state.
    ///
    /// # Errors
    /// A part refuses its state.
    pub(crate) fn restore(&self, vm: &Vm, cpus: &[Vcpu], parts: &Parts) -> Result<()> {
        ensure!(self.processors.len() == cpus.len(), "the state has {} processors", self.processors.len());
        for (number, (cpu, saved)) in cpus.iter().zip(&self.processors).enumerate() {
            processor::restore(cpu, saved).with_context(|| format!("processor {number}"))?;
        }
        controllers::restore(vm.fd(), &self.controllers)?;
        parts.power.set_panicked(self.ports.panicked);
        ConfigPorts::new(parts.bus.clone()).pio_write(PCI_ADDRESS, 0, &self.ports.pci_address.to_le_bytes());
        for ((name, function), state) in parts.functions().into_iter().zip([&self.network, &self.rdma]) {
            function.restore(&mut &state[..]).map_err(Error::from_boxed).context(name)?;
        }
        self.restore_slots(parts)
    }

    fn restore_slots(&self, parts: &Parts) -> Result<()> {
        let mut disks = parts.disks.iter();
        ensure!(self.slots.len() == parts.slots.len(), "the state has {} slots", self.slots.len());
        for (slot, saved) in parts.slots.iter().zip(&self.slots) {
            let Slot { number, config, vectors, disk } = saved;
            ensure!(*number == u32::from(slot.number()), "the state has slot {number} in place of {}", slot.number());
            if let Some(registers) = disk {
                disks.next().context("the state has more disks")?.restore(registers)?;
            }
            ensure!(matches!(config.len(), 0 | CONFIG_SIZE), "a configuration space of {} bytes", config.len());
            if !config.is_empty() {
                slot.config_write(0, 0, config);
            }
            slot.restore_vectors(&vectors.iter().map(vector).collect::<Result<Vec<_>>>()?);
        }
        ensure!(disks.next().is_none(), "the state has fewer disks");
        Ok(())
    }
}

fn append(to: &mut Vec<u8>, body: &[u8]) -> Result<()> {
    ensure!(to.len().saturating_add(body.len()) as u64 <= MAX_FUNCTION, "the state of a function is too long");
    to.extend_from_slice(body);
    Ok(())
}

fn ports(parts: &Parts) -> Ports {
    let mut address = [0; 4];
    ConfigPorts::new(parts.bus.clone()).pio_read(PCI_ADDRESS, 0, &mut address);
    let second = parts.second.as_ref();
    Ports {
        pci_address: u32::from_le_bytes(address),
        console: Some(parts.console.lock().unwrap_or_else(PoisonError::into_inner).save()),
        second: second.map(|port| port.lock().unwrap_or_else(PoisonError::into_inner).save()),
        panicked: parts.power.has_panicked(),
    }
}

/// Returns the state of all slots. The pair of functions saves its own configuration space.
fn slots(parts: &Parts, disks: &[DiskRegisters]) -> Result<Vec<Slot>> {
    let mut disks = disks.iter().copied();
    let save = |slot: &std::sync::Arc<BusSlot>| {
        let is_pair = slot.number() == crate::fabric::SLOT;
        let mut config = vec![0; if is_pair { 0 } else { CONFIG_SIZE }];
        slot.config_read(0, 0, &mut config);
        let vectors = slot.save_vectors().into_iter().map(|saved| Vector {
            function: saved.function.into(),
            vector: saved.vector.into(),
            address: saved.message.address,
            data: saved.message.data,
            masked: saved.masked,
            pending: saved.pending,
        });
        let is_disk = crate::parts::is_disk(slot.number(), parts.disks.len());
        let disk = if is_disk { Some(disks.next().context("a disk without state")?) } else { None };
        Ok(Slot { number: slot.number().into(), config, vectors: vectors.collect(), disk })
    };
    parts.slots.iter().map(save).collect()
}

fn vector(saved: &Vector) -> Result<SavedVector> {
    let &Vector { function, vector, address, data, masked, pending } = saved;
    let message = Message { address, data };
    Ok(SavedVector { function: function.try_into()?, vector: vector.try_into()?, message, masked, pending })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Hello {
        Hello { cpus: 2, ..Hello::default() }
    }

    fn state() -> State {
        State {
            processors: vec![Processor { regs: vec![1, 2], ..Processor::default() }, Processor::default()],
            controllers: Controllers { clock: 77, ..Controllers::default() },
            ports: Ports { pci_address: 0x8000_0000, panicked: true, ..Ports::default() },
            slots: vec![Slot { number: 3, config: vec![9; CONFIG_SIZE], ..Slot::default() }],
            network: vec![5; 10],
            rdma: vec![6; 3 << 20],
        }
    }

    fn receive(fill: impl FnOnce(&mut Sender<Vec<u8>>)) -> Result<State> {
        let mut sender = Sender::new(Vec::new()).unwrap();
        fill(&mut sender);
        let stream = sender.finish().unwrap();
        State::receive(&hello(), &mut Receiver::new(&stream[..]).unwrap(), &crate::memory::allocate(1 << 20).unwrap())
    }

    #[test]
    fn a_state_arrives_as_it_was_sent() {
        assert!(receive(|sender| state().send(sender).unwrap()).unwrap() == state());
    }

    #[test]
    fn more_or_less_than_a_machine_has_is_refused() {
        let refuse = |fill: &dyn Fn(&mut Sender<Vec<u8>>), what: &str| {
            let error = format!("{:#}", receive(fill).unwrap_err());
            assert!(error.contains(what), "{what}: {error}");
        };
        let cpus = |sender: &mut Sender<Vec<u8>>, count| {
            (0..count).for_each(|_| sender.message(Kind::Processor, &Processor::default()).unwrap());
        };
        refuse(&|sender| cpus(sender, 1), "1 processors");
        refuse(&|sender| cpus(sender, 3), "3 processors");
        refuse(&|sender| (0..33).for_each(|_| sender.message(Kind::Slot, &Slot::default()).unwrap()), "33 slots");
        refuse(&|sender| sender.message(Kind::Hello, &hello()).unwrap(), "two beginnings");
        refuse(&|sender| sender.frame(Kind::Commit, &[]).unwrap(), "a frame Commit");
        refuse(&|sender| sender.frame(Kind::Pages, &[&[0; 9]]).unwrap(), "no pages");
        let long = vec![0; 1 << 20];
        let more = MAX_FUNCTION >> 20;
        refuse(&|sender| (0..=more).for_each(|_| sender.frame(Kind::Rdma, &[&long]).unwrap()), "too long");
        let big = Vector { vector: 0x1_0000, ..Vector::default() };
        assert!(vector(&big).is_err());
    }
}
