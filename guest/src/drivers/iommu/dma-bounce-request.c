// SPDX-License-Identifier: GPL-2.0-only
/*
 * Bouncing block requests as a whole
 *
 * Newer kernels have no scatterlist of a request: its driver maps the pieces one by one, or links
 * them into one range of IOVA. A request that bounces takes one slot instead. Nothing of it need be
 * remembered: it has its pieces still when it is unmapped, before it is completed.
 */

#include <linux/blk-mq.h>
#include <linux/dma-mapping.h>
#include <linux/memremap.h>

#include "dma-bounce-pool.h"

/**
 * dma_bounce_request_packable - whether a request can be packed into one slot
 * @dev: its device
 * @req: the request
 * @limit: most bytes
 * @start: where to put the address of its first byte
 * @reason: where to put why not
 *
 * Return: its bytes, or 0.
 */
size_t dma_bounce_request_packable(struct device *dev, struct request *req, size_t limit,
				   phys_addr_t *start, enum dma_bounce_stat *reason)
{
	unsigned int align = dma_get_min_align_mask(dev);
	struct req_iterator iter;
	struct bio_vec bv;
	size_t len = 0;

	*reason = DMA_BOUNCE_FB_LAYOUT;
	/* One segment, of which the slot's alignment says where it may lie */
	if (req->rq_flags & RQF_SPECIAL_PAYLOAD || !req->bio ||
	    dma_get_seg_boundary(dev) < DMA_BOUNCE_MAX_SLOT - 1)
		return 0;
	if (blk_rq_payload_bytes(req) > min_t(size_t, limit, dma_get_max_seg_size(dev))) {
		*reason = DMA_BOUNCE_FB_SIZE;
		return 0;
	}
	rq_for_each_bvec(bv, req, iter) {
		if (is_zone_device_page(bv.bv_page)) {
			*reason = DMA_BOUNCE_FB_MEMORY;
			return 0;
		}
		if (!len)
			*start = bvec_phys(&bv);
		/* Each piece follows the one before it: are its low bits the right ones then? */
		else if (((*start + len) ^ bvec_phys(&bv)) & align)
			return 0;
		len += bv.bv_len;
	}
	return len == blk_rq_payload_bytes(req) ? len : 0;
}

/**
 * dma_bounce_copy_request - copy between the data of a request and a bounce buffer
 * @buffer: the bounce buffer of the whole request
 * @req: the request
 * @skip: bytes at its start that are left out
 * @len: bytes to copy
 * @to_buffer: to the bounce buffer; otherwise from it
 */
void dma_bounce_copy_request(void *buffer, struct request *req, size_t skip, size_t len,
			     bool to_buffer)
{
	struct req_iterator iter;
	struct bio_vec bv;
	size_t part;

	rq_for_each_bvec(bv, req, iter) {
		if (skip >= bv.bv_len) {
			skip -= bv.bv_len;
			buffer += bv.bv_len;
			continue;
		}
		part = min_t(size_t, bv.bv_len - skip, len);
		dma_bounce_copy(buffer + skip, bvec_phys(&bv) + skip, part, to_buffer);
		buffer += bv.bv_len;
		len -= part;
		skip = 0;
		if (!len)
			break;
	}
}
