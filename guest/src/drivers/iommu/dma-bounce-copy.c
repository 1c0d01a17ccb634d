// SPDX-License-Identifier: GPL-2.0-only
/*
 * Bouncing of small DMA: copies between buffers and slots
 *
 * When a buffer is mapped, it is copied to its slot, whatever the direction. So unmapping does not
 * change bytes that the device did not write, and the buffer never gets bytes of the slot's earlier
 * user.
 *
 * A driver can avoid this copy with two attributes. With DMA_ATTR_BOUNCE_NO_COPY_IN, nothing is
 * copied at map. Then the slot is copied back only if the driver unmaps with
 * DMA_ATTR_BOUNCE_ALL_WRITTEN, which reports that the device wrote every byte.
 *
 * Functions that work on a slot run in an RCU read-side critical section. The memory of the slot is
 * not freed before the section ends.
 */

#include <linux/blk-mq.h>
#include <linux/dma-mapping.h>
#include <linux/io.h>
#include <linux/kmsan-checks.h>
#include <linux/mm.h>
#include <linux/scatterlist.h>

#include <trace/events/dma_bounce.h>

#include "dma-bounce-copy.h"

/*
 * Returns true if copy_page() is faster than memcpy(). On x86, memcpy() is one REP MOVSB
 * instruction if the CPU has FSRM (fast short REP MOV). Without FSRM, memcpy() is a loop that moves
 * 32 bytes at a time. copy_page() uses REP MOVSQ, which is fast for whole pages also without FSRM.
 */
static bool copy_by_page(void *to, void *from, size_t len)
{
#ifdef CONFIG_X86
	return !cpu_feature_enabled(X86_FEATURE_FSRM) &&
	       PAGE_ALIGNED((unsigned long)to | (unsigned long)from | len);
#else
	return false;
#endif
}

/**
 * dma_bounce_copy - copy between mapped memory and a bounce buffer
 * @buffer: the bounce buffer
 * @phys: physical address of the mapped memory
 * @len: number of bytes
 * @to_buffer: true to copy to the bounce buffer, false to copy from it
 */
void dma_bounce_copy(void *buffer, phys_addr_t phys, size_t len, bool to_buffer)
{
	void *va = phys_to_virt(phys), *to = to_buffer ? buffer : va;
	void *from = to_buffer ? va : buffer;

	/*
	 * KMSAN does not see what a device writes. It would take the bytes for uninitialised if the
	 * buffer was when it was copied in.
	 */
	if (!to_buffer)
		kmsan_unpoison_memory(from, len);
	if (!copy_by_page(to, from, len)) {
		memcpy(to, from, len);
		return;
	}
	for (; len; len -= PAGE_SIZE, to += PAGE_SIZE, from += PAGE_SIZE)
		copy_page(to, from);
}

/* Copies @len bytes of a list, from offset @skip. */
static void copy_sg(void *slot, struct scatterlist *sgl, int nents, size_t skip, size_t len,
		    bool to_slot)
{
	struct scatterlist *s;
	size_t part;
	int i;

	for_each_sg(sgl, s, nents, i) {
		if (skip >= s->length) {
			skip -= s->length;
			slot += s->length;
			continue;
		}
		part = min_t(size_t, s->length - skip, len);
		dma_bounce_copy(slot + skip, sg_phys(s) + skip, part, to_slot);
		slot += s->length;
		len -= part;
		skip = 0;
		if (!len)
			break;
	}
}

/* Copies @len bytes of a request's data, from offset @skip. */
static void copy_request(void *slot, struct request *req, size_t skip, size_t len, bool to_slot)
{
	struct req_iterator iter;
	struct bio_vec bv;
	size_t part;

	rq_for_each_bvec(bv, req, iter) {
		if (skip >= bv.bv_len) {
			skip -= bv.bv_len;
			slot += bv.bv_len;
			continue;
		}
		part = min_t(size_t, bv.bv_len - skip, len);
		dma_bounce_copy(slot + skip, bvec_phys(&bv) + skip, part, to_slot);
		slot += bv.bv_len;
		len -= part;
		skip = 0;
		if (!len)
			break;
	}
}

/**
 * dma_bounce_slot_copy - copy part of a slot's mapping
 * @pool: the pool of the slot
 * @slot: the slot
 * @sgl: the caller's list of the mapping, which may be a copy of the list that was mapped. If NULL,
 *	the list that was mapped is used, and must still exist.
 * @skip: offset of the part in the mapping
 * @len: length of the part in bytes
 * @to_slot: true to copy to the slot, false to copy from it
 */
void dma_bounce_slot_copy(struct dma_bounce_pool *pool, struct dma_bounce_slot *slot,
			  struct scatterlist *sgl, size_t skip, size_t len, bool to_slot)
{
	void *va = dma_bounce_slot_va(slot) + slot->offset;

	switch (slot->mapped) {
	case DMA_BOUNCE_SINGLE:
	case DMA_BOUNCE_ENTRY:
		dma_bounce_copy(va + skip, slot->phys + skip, len, to_slot);
		break;
	case DMA_BOUNCE_LIST:
		copy_sg(va, sgl ?: slot->sgl, slot->nents, skip, len, to_slot);
		break;
	default:
		if (IS_ENABLED(CONFIG_IOMMU_DMA_BOUNCE_REQUEST))
			copy_request(va, slot->req, skip, len, to_slot);
	}
	this_cpu_add(pool->slots.cpus->bytes[to_slot], len);
}

/**
 * __dma_bounce_slot_fill - copy a buffer to its slot at map
 * @pool: the pool of the slot
 * @dev: the device that maps. If it is untrusted, the rest of the slot is zeroed.
 * @slot: a slot that describes its mapping
 */
void __dma_bounce_slot_fill(struct dma_bounce_pool *pool, struct device *dev,
			    struct dma_bounce_slot *slot)
{
	if (dma_bounce_untrusted(dev))
		memset(dma_bounce_slot_va(slot), 0, dma_bounce_slot_size(slot));
	dma_bounce_slot_copy(pool, slot, NULL, 0, slot->len, true);
}

/**
 * dma_bounce_slot_trace - trace that a slot was mapped
 * @dev: the device that maps
 * @slot: the slot
 */
void dma_bounce_slot_trace(struct device *dev, struct dma_bounce_slot *slot)
{
	trace_dma_bounce_map(dev, dma_bounce_slot_iova(slot) + slot->offset, slot->len,
			     slot->nents, !slot->no_copy_in);
}

/**
 * dma_bounce_slot_trace_end - trace that a slot is unmapped
 * @dev: the device that unmaps
 * @slot: the slot
 * @copy: true if the slot was copied back
 */
void dma_bounce_slot_trace_end(struct device *dev, struct dma_bounce_slot *slot, bool copy)
{
	trace_dma_bounce_unmap(dev, dma_bounce_slot_iova(slot) + slot->offset, slot->len,
			       slot->nents, copy);
}

/**
 * dma_bounce_slot_lost - warn that the data of a mapping is lost
 * @pool: the pool of the mapping's slot
 * @dev: the device that unmaps
 *
 * The last device left the domain while the mapping was in use, so the slot's memory is gone. This
 * also happens to a driver that resets its device without waiting for its transfers. Warns once for
 * each pool.
 */
void dma_bounce_slot_lost(struct dma_bounce_pool *pool, struct device *dev)
{
	if (!xchg(&pool->warned, true))
		dev_warn(dev, "data of mappings is lost: their domain lost its devices while they were mapped\n");
}

/**
 * dma_bounce_slot_sync - synchronise part of a slot's mapping
 * @pool: the pool of the slot
 * @dev: the device
 * @slot: the slot
 * @sgl: see dma_bounce_slot_copy()
 * @skip: offset of the part in the mapping
 * @len: length of the part in bytes. The whole part is in the mapping.
 * @dir: direction of the transfers that the call is for
 * @for_device: true if the device gets the part, false if the CPU gets it
 *
 * If the device only writes, nothing is copied to the slot, because the device may already have
 * written to the slot. If the device only reads, nothing is copied to the buffer, because the CPU
 * may have written to the buffer.
 */
void dma_bounce_slot_sync(struct dma_bounce_pool *pool, struct device *dev,
			  struct dma_bounce_slot *slot, struct scatterlist *sgl, size_t skip,
			  size_t len, enum dma_data_direction dir, bool for_device)
{
	bool copy = dma_bounce_sync_copies(dir, for_device) &&
		    (for_device || slot->chunk->kind != DMA_BOUNCE_READ);

	dma_bounce_count(pool, DMA_BOUNCE_SYNCS, 1);
	if (READ_ONCE(slot->chunk->state) == DMA_BOUNCE_DEAD)
		return;
	/* Bytes that the device did not write are older data: map did not copy the buffer. */
	if (!for_device && copy && WARN_ON_ONCE(slot->no_copy_in))
		copy = false;
	if (copy)
		dma_bounce_slot_copy(pool, slot, sgl, skip, len, for_device);
	trace_dma_bounce_sync(dev, dma_bounce_slot_iova(slot) + slot->offset + skip, len,
			      for_device, copy);
}
