// SPDX-License-Identifier: GPL-2.0-only
/*
 * Requests to the virtio-iommu
 *
 * They go one at a time and wait for the answer with interrupts off, as those of the kernel's own
 * driver do: DMA is mapped where nothing may sleep.
 */

#include <linux/bitmap.h>

#include "virtio-iommu-bounce.h"

static int error_of(u8 status)
{
	switch (status) {
	case VIRTIO_IOMMU_S_OK:
		return 0;
	case VIRTIO_IOMMU_S_UNSUPP:
		return -EOPNOTSUPP;
	case VIRTIO_IOMMU_S_INVAL:
		return -EINVAL;
	case VIRTIO_IOMMU_S_RANGE:
		return -ERANGE;
	case VIRTIO_IOMMU_S_NOENT:
		return -ENOENT;
	case VIRTIO_IOMMU_S_NOMEM:
		return -ENOMEM;
	default:
		return -EIO;
	}
}

static int request_locked(struct vib_device *device, void *request, size_t readable, size_t size)
{
	struct scatterlist out, in, *sgs[] = { &out, &in };
	struct virtio_iommu_req_tail *tail;
	unsigned int len;
	int ret;

	if (!device->vq || size > device->buffer_len)
		return -ENODEV;
	memcpy(device->buffer, request, size);
	sg_init_one(&out, device->buffer, readable);
	sg_init_one(&in, device->buffer + readable, size - readable);
	ret = virtqueue_add_sgs(device->vq, sgs, 1, 1, device, GFP_ATOMIC);
	if (ret)
		return ret;
	virtqueue_kick(device->vq);
	while (!virtqueue_get_buf(device->vq, &len)) {
		if (virtqueue_is_broken(device->vq))
			return -EIO;
		cpu_relax();
	}
	if (len != size - readable)
		return -EIO;
	memcpy(request + readable, device->buffer + readable, len);
	tail = request + size - sizeof(*tail);
	return error_of(tail->status);
}

/**
 * vib_request - send a request and wait for the answer; does not sleep
 * @device: the virtio-iommu
 * @request: the request, with room for the reply behind it
 * @readable: bytes that the device reads
 * @size: bytes with the reply, which ends with the status
 *
 * Return: 0 or an error. Where the device did not answer as it should, the reply is as it was.
 */
int vib_request(struct vib_device *device, void *request, size_t readable, size_t size)
{
	unsigned long flags;
	int ret;

	spin_lock_irqsave(&device->lock, flags);
	ret = request_locked(device, request, readable, size);
	spin_unlock_irqrestore(&device->lock, flags);
	return ret;
}

/**
 * vib_window_add - have a chunk backed and mapped; does not sleep
 * @device: the virtio-iommu
 * @domain: the domain
 * @iova: where
 * @offset: where to say its place in the region
 *
 * Return: 0 or an error, -ENOMEM if the budget is used up. After another error the device may have
 * a chunk there: it refuses the next one at @iova.
 */
int vib_window_add(struct vib_device *device, u32 domain, u64 iova, u64 *offset)
{
	struct virtio_iommu_req_window_add add = {
		.head.type	= VIRTIO_IOMMU_T_WINDOW_ADD,
		.domain		= cpu_to_le32(domain),
		.flags		= cpu_to_le32(VIRTIO_IOMMU_MAP_F_READ | VIRTIO_IOMMU_MAP_F_WRITE),
		.iova		= cpu_to_le64(iova),
	};
	unsigned long flags;
	bool claimed = false;
	int ret;

	spin_lock_irqsave(&device->lock, flags);
	ret = request_locked(device, &add, offsetof(typeof(add), shm_offset), sizeof(add));
	*offset = le64_to_cpu(add.shm_offset);
	if (!ret && IS_ALIGNED(*offset, device->chunk_size) && *offset < device->region_len)
		claimed = !__test_and_set_bit(*offset / device->chunk_size, device->shown);
	spin_unlock_irqrestore(&device->lock, flags);
	if (ret || claimed)
		return ret;
	dev_err_ratelimited(&device->vdev->dev, "device puts a chunk at %#llx\n", *offset);
	return -EIO;
}

/**
 * vib_window_ended - a chunk is gone, as its domain has ended
 * @device: the virtio-iommu
 * @offset: its place in the region
 */
void vib_window_ended(struct vib_device *device, u64 offset)
{
	unsigned long flags;

	spin_lock_irqsave(&device->lock, flags);
	__clear_bit(offset / device->chunk_size, device->shown);
	spin_unlock_irqrestore(&device->lock, flags);
}
