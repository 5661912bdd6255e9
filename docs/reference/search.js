// To the search "--keep-fp16" means all pages without "-keep-fp16"; here it is the name of an option.
const postMessage = Worker.prototype.postMessage
Worker.prototype.postMessage = function (message, ...rest) {
  const query = 2
  if (message?.type === query && typeof message.data === "string")
    message = { ...message, data: message.data.replace(/(^|\s)-+(?=\w)/g, "$1") }
  return postMessage.call(this, message, ...rest)
}
