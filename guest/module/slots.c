// SPDX-License-Identifier: GPL-2.0-only
/*
 * Slots of bounce windows
 *
 * A slot belongs to one endpoint, as its chunk does, for as long as the endpoint has a driver: what
 * an earlier use left in it is that endpoint's own DMA. Chunks come when the last slot of a size is
 * taken, and stay.
 */

#include <linux/jiffies.h>
#include <linux/log2.h>
#include <linux/slab.h>

#include "virtio-iommu-bounce.h"

/**
 * vib_slots_init - begin without chunks
 * @endpoint: whose slots
 *
 * Return: 0 or an error.
 */
int vib_slots_init(struct vib_endpoint *endpoint)
{
	unsigned int i;

	for (i = 0; i < VIB_CLASSES; i++) {
		spin_lock_init(&endpoint->classes[i].lock);
		endpoint->classes[i].retry = jiffies;
	}
	endpoint->places = min_t(u64, endpoint->device->iova_len / endpoint->device->chunk_size,
				 INT_MAX);
	endpoint->chunks = kvcalloc(endpoint->places, sizeof(*endpoint->chunks), GFP_KERNEL);
	return endpoint->chunks ? 0 : -ENOMEM;
}

/**
 * vib_slots_free - forget all chunks
 * @endpoint: whose slots; its domain has ended, and its window with it
 */
void vib_slots_free(struct vib_endpoint *endpoint)
{
	unsigned int i;

	for (i = 0; i < endpoint->places; i++) {
		if (!endpoint->chunks[i])
			continue;
		vib_window_ended(endpoint->device, endpoint->chunks[i]->offset);
		kfree(endpoint->chunks[i]);
	}
	kvfree(endpoint->chunks);
}

/* Takes a place of the table that no other class takes at the same time. */
static int claim_place(struct vib_endpoint *endpoint, struct vib_chunk *chunk)
{
	unsigned int i;

	for (i = 0; i < endpoint->places; i++)
		if (!endpoint->chunks[i] && !cmpxchg(&endpoint->chunks[i], NULL, chunk))
			return i;
	return -ENOSPC;
}

/* Adds a chunk to a class whose lock is held; the request does not sleep. */
static void grow(struct vib_endpoint *endpoint, unsigned int class)
{
	struct vib_device *device = endpoint->device;
	unsigned int shift = VIB_MIN_SHIFT + class;
	unsigned int count = device->chunk_size >> shift;
	struct vib_class *slots = &endpoint->classes[class];
	struct vib_chunk *chunk;
	unsigned int i;
	int place;
	u64 iova;

	if (time_before(jiffies, slots->retry))
		return;
	slots->retry = jiffies + HZ;
	chunk = kzalloc(struct_size(chunk, slots, count), GFP_ATOMIC | __GFP_NOWARN);
	if (!chunk)
		return;
	chunk->class = class;
	place = claim_place(endpoint, chunk);
	if (place < 0)
		goto free;
	iova = device->iova_start + place * device->chunk_size;
	if (vib_window_add(device, endpoint->domain, iova, &chunk->offset)) {
		WRITE_ONCE(endpoint->chunks[place], NULL);
		goto free;
	}
	for (i = 0; i < count; i++) {
		struct vib_slot *slot = &chunk->slots[i];

		slot->va = device->region + chunk->offset + ((u64)i << shift);
		slot->iova = iova + ((u64)i << shift);
		slot->next = slots->free;
		slots->free = slot;
	}
	slots->retry = jiffies;
	atomic_inc(&endpoint->nchunks);
	return;

free:
	kfree(chunk);
}

/**
 * vib_slot_take - take a slot
 * @endpoint: for whose DMA
 * @skip: bytes that the data begins after a page's start
 * @size: bytes of data, not 0
 *
 * Return: the slot, or NULL if there is none.
 */
struct vib_slot *vib_slot_take(struct vib_endpoint *endpoint, size_t skip, size_t size)
{
	unsigned int class;
	struct vib_class *slots;
	struct vib_slot *slot;
	unsigned long flags;

	if (size > VIB_MAX_SLOT || skip + size > VIB_MAX_SLOT)
		return NULL;
	class = max_t(int, ilog2(roundup_pow_of_two(skip + size)) - VIB_MIN_SHIFT, 0);
	slots = &endpoint->classes[class];
	spin_lock_irqsave(&slots->lock, flags);
	if (!slots->free)
		grow(endpoint, class);
	slot = slots->free;
	if (slot)
		slots->free = slot->next;
	spin_unlock_irqrestore(&slots->lock, flags);
	if (slot) {
		slot->skip = skip;
		slot->size = size;
		slot->sgl = NULL;
	}
	return slot;
}

/**
 * vib_slot_find - the slot of a DMA address
 * @endpoint: for whose DMA
 * @addr: an address within its window
 *
 * Return: the slot, or NULL, with a warning, if nothing is mapped there.
 */
struct vib_slot *vib_slot_find(struct vib_endpoint *endpoint, dma_addr_t addr)
{
	struct vib_device *device = endpoint->device;
	u64 offset = addr - device->iova_start;
	u64 place = offset / device->chunk_size;
	struct vib_chunk *chunk = NULL;
	struct vib_slot *slot;

	if (place < endpoint->places)
		chunk = READ_ONCE(endpoint->chunks[place]);
	if (WARN_ONCE(!chunk, "no window at %pad\n", &addr))
		return NULL;
	slot = &chunk->slots[(offset & (device->chunk_size - 1)) >> (VIB_MIN_SHIFT + chunk->class)];
	if (WARN_ONCE(addr - slot->iova - slot->skip >= slot->size, "no DMA at %pad\n", &addr))
		return NULL;
	return slot;
}

/**
 * vib_slot_give - give a slot back
 * @endpoint: for whose DMA it was
 * @slot: the slot
 */
void vib_slot_give(struct vib_endpoint *endpoint, struct vib_slot *slot)
{
	u64 place = (slot->iova - endpoint->device->iova_start) / endpoint->device->chunk_size;
	struct vib_class *slots = &endpoint->classes[endpoint->chunks[place]->class];
	unsigned long flags;

	slot->size = 0;
	spin_lock_irqsave(&slots->lock, flags);
	slot->next = slots->free;
	slots->free = slot;
	spin_unlock_irqrestore(&slots->lock, flags);
}

/**
 * vib_copy - copy between a buffer and its slot
 * @slot: the slot, which has a buffer
 * @offset: where to begin, in bytes of data
 * @len: how many bytes; what is beyond the data is left out
 * @in: whether to the slot
 */
void vib_copy(struct vib_slot *slot, size_t offset, size_t len, bool in)
{
	void *va = slot->va + slot->skip + offset;
	struct scatterlist *sg;
	unsigned int i;

	if (offset >= slot->size)
		return;
	len = min_t(size_t, len, slot->size - offset);
	if (!slot->sgl) {
		if (in)
			memcpy(va, slot->orig + offset, len);
		else
			memcpy(slot->orig + offset, va, len);
		return;
	}
	for_each_sg(slot->sgl, sg, slot->nents, i) {
		size_t part;

		if (offset >= sg->length) {
			offset -= sg->length;
			continue;
		}
		part = min_t(size_t, len, sg->length - offset);
		if (in)
			memcpy(va, sg_virt(sg) + offset, part);
		else
			memcpy(sg_virt(sg) + offset, va, part);
		va += part;
		len -= part;
		offset = 0;
		if (!len)
			return;
	}
}
